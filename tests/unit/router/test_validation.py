"""What a client may ask for, and which field is named when it may not."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from common.messages import Envelope, ToRouter
from common.modes import DisaggregationMode
from router.adapters import AdapterCatalogue
from router.config import RouterConfig
from router.errors import ApiError
from router.model_names import ModelNames
from router.nodes import NodeRegistry
from router.prepare import Preparer
from router.prepared import Prepared
from router.protocol.body import decode_body
from router.protocol.requests import ChatRequest, CompletionRequest, GenerateRequest
from router.tokens import TextCodec, load_codec, load_model_info
from tests.unit.router.checking import ChecksHere
from tests.unit.router.desk import hello

COMPLETION = msgspec.json.Decoder(CompletionRequest)
CHAT = msgspec.json.Decoder(ChatRequest)
GENERATE = msgspec.json.Decoder(GenerateRequest)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def preparer(tiny_folder: Path) -> Preparer:
    return make_preparer(tiny_folder, num_pages=64)


def make_preparer(folder: Path, num_pages: int) -> Preparer:
    codec: TextCodec = load_codec(folder)
    registry = NodeRegistry("router", 3.0)
    for role in DisaggregationMode:
        message = hello(role, role.value, num_pages=num_pages)
        registry.receive(b"", Envelope[ToRouter](role.value, "", 1, message), 0.0)
    config = RouterConfig(
        model="/models/tiny",
        max_n=4,
        max_choices=8,
        max_prompt_logprobs=6000,
        max_unsent_bytes=128_000,
    )
    info = load_model_info(folder, codec)
    names = ModelNames("tiny", config.model, AdapterCatalogue())
    return Preparer(codec, info, registry, config, names, Random(3), ChecksHere(folder))


def completion(preparer: Preparer, **body: Any) -> Prepared:
    raw = json.dumps({"prompt": "hello", **body}).encode()
    return asyncio.run(preparer.completion(decode_body(COMPLETION, raw)))


def chat(preparer: Preparer, **body: Any) -> Prepared:
    raw = json.dumps({"messages": USER, **body}).encode()
    return asyncio.run(preparer.chat(decode_body(CHAT, raw)))


def generate(preparer: Preparer, **body: Any) -> Prepared:
    return asyncio.run(preparer.generate(decode_body(GENERATE, json.dumps(body).encode())))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [2**70]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"prompt": ["a"] * 3, "n": 4}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 5}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 3, "best_of": 4}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": "1"}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 2**65}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt": [5] * 300, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 300, "logprobs": 20, "echo": True}, "logprobs"),
        ({"prompt": [[5] * 300] * 4, "n": 2, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": [5] * 300, "logprobs": 3, "echo": True, "stream": True}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_bad_completions_are_400_naming_the_field(
    preparer: Preparer, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        completion(preparer, **body)
    assert (refused.value.status, refused.value.param) == (400, param)
    error = refused.value.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 5}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ({"max_completion_tokens": 513}, "max_completion_tokens"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)  # fmt: skip
def test_bad_chats_are_400_naming_the_field(
    preparer: Preparer, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        chat(preparer, **body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}},
         "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "ab", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"text": "ab", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", "b"], "return_logprob": True, "logprob_start_len": [0]},
         "logprob_start_len"),
        ({"text": ["a", "b"], "return_logprob": True, "top_logprobs_num": [1, 21]},
         "top_logprobs_num"),
        ({"input_ids": [[5] * 300] * 8, "return_logprob": True, "logprob_start_len": 0,
          "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": "a", "lora_path": ["x", None]}, "lora_path"),
        ({"text": "a", "lora_path": 7}, "lora_path"),
    ],
)  # fmt: skip
def test_bad_generates_are_400_naming_the_field(
    preparer: Preparer, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        generate(preparer, **body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null", b'{"prompt": "\\ud800"}', b"[" * 9999],
)
def test_what_is_no_json_object_is_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(COMPLETION, raw)
    assert refused.value.status == 400


def test_unknown_models_are_404_and_known_names_are_not(preparer: Preparer) -> None:
    with pytest.raises(ApiError) as refused:
        completion(preparer, model="gpt")
    assert (refused.value.status, refused.value.param) == (404, "model")
    for name in ("tiny", "/models/tiny", "", None):
        completion(preparer, model=name)


def test_null_is_the_default_and_unknown_fields_are_ignored(preparer: Preparer) -> None:
    fields = set(CompletionRequest.__struct_fields__) - {"prompt"}
    nulls = dict.fromkeys(fields)
    prepared = completion(preparer, **nulls, bootstrap_room=7, bootstrap_host="x", user="me")
    (choice,) = prepared.choices
    plain = completion(preparer, seed=5).choices[0].sampling
    assert msgspec.structs.replace(choice.sampling, seed=5) == plain
    assert plain.max_tokens == 16
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 0, 1.0)
    assert plain.stop_token_ids == (2,)


def test_all_forms_of_a_prompt(preparer: Preparer) -> None:
    ids = preparer.codec.encode_now("hello")
    for prompt, count in (("hello", 1), (["hello"], 1), (ids, 1), ([ids, ids], 2)):
        prepared = completion(preparer, prompt=prompt, max_tokens=4)
        assert [choice.prompt_ids for choice in prepared.choices] == [ids] * count
    assert prepared.prompt_tokens == 2 * len(ids)


def test_choices_of_a_prompt_share_the_seed_and_differ_in_number(preparer: Preparer) -> None:
    prepared = completion(preparer, prompt=["a", "b"], n=3, seed=-1, best_of=3)
    assert [choice.sampling.choice for choice in prepared.choices] == [0, 1, 2] * 2
    assert {choice.sampling.seed for choice in prepared.choices} == {2**63 - 1}
    assert (prepared.n, prepared.prompt_tokens) == (3, 2)


def test_an_echo_with_logprobs_asks_for_the_prompts(preparer: Preparer) -> None:
    for body, asked in (
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, 3),
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"prompt_logprobs": 0}, 0),
    ):
        (choice,) = completion(preparer, **body).choices
        assert choice.sampling.prompt_logprobs == asked, body


def test_nothing_is_to_be_generated(preparer: Preparer) -> None:
    (choice,) = completion(preparer, echo=True, max_tokens=0).choices
    assert (choice.sampling.max_tokens, choice.text.prompt_only) == (1, True)
    (choice,) = generate(preparer, text="a", sampling_params={"max_new_tokens": 0}).choices
    assert (choice.sampling.max_tokens, choice.text.prompt_only) == (1, True)
    assert not completion(preparer, echo=True, max_tokens=1).choices[0].text.prompt_only


def test_more_are_drawn_than_kept(preparer: Preparer) -> None:
    prepared = completion(preparer, prompt=["a", "b"], n=2, best_of=4)
    assert (len(prepared.choices), prepared.n, prepared.num_kept) == (8, 4, 2)
    assert {choice.sampling.logprobs for choice in prepared.choices} == {0}
    assert completion(preparer, n=2, best_of=2).num_kept is None
    assert completion(preparer, n=2, best_of=2).choices[0].sampling.logprobs is None


def test_chat_defaults_to_what_fits(preparer: Preparer, tiny_folder: Path) -> None:
    (choice,) = chat(preparer).choices
    assert len(choice.prompt_ids) + choice.sampling.max_tokens == 512
    (choice,) = chat(make_preparer(tiny_folder, num_pages=4)).choices
    assert len(choice.prompt_ids) + choice.sampling.max_tokens == 4 * 16


def test_what_no_pool_can_hold_is_400_at_once(tiny_folder: Path) -> None:
    small = make_preparer(tiny_folder, num_pages=4)
    with pytest.raises(ApiError) as refused:
        completion(small, prompt=[5] * 60, max_tokens=5)
    assert (refused.value.status, refused.value.param) == (400, "max_tokens")
    with pytest.raises(ApiError) as refused:
        completion(small, prompt=[5] * 64)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert completion(small, prompt=[5] * 60, max_tokens=4).choices[0].sampling.max_tokens == 4


def test_exactly_the_context_length_is_allowed(preparer: Preparer) -> None:
    assert completion(preparer, prompt=[5] * 511).choices[0].sampling.max_tokens == 1
    assert completion(preparer, prompt=[5] * 500, max_tokens=12)


def test_ignore_eos_leaves_only_the_users_stop_tokens(preparer: Preparer) -> None:
    sampling = completion(preparer, ignore_eos=True, stop_token_ids=[9]).choices[0].sampling
    assert sampling.stop_token_ids == (9,)


def test_sglang_names_and_defaults(preparer: Preparer) -> None:
    wish = {"max_new_tokens": 5, "sampling_seed": 3, "no_stop_trim": True, "stop": "x", "top_k": -1}
    (choice,) = generate(preparer, text="a", sampling_params=wish).choices
    assert (choice.sampling.max_tokens, choice.sampling.seed, choice.sampling.top_k) == (5, 3, 0)
    assert (choice.text.stops, choice.text.include_stop) == (("x",), True)
    assert generate(preparer, text="a").choices[0].sampling.max_tokens == 128


def test_echo_keeps_the_prompts_as_they_were_written(preparer: Preparer) -> None:
    ids = preparer.codec.encode_now("abc")
    assert completion(preparer, prompt=["one", "two"], echo=True).prompt_texts == ("one", "two")
    assert completion(preparer, prompt=ids, echo=True).prompt_texts == ("abc",)
    assert completion(preparer, prompt=[ids, ids], echo=True).prompt_texts == ("abc", "abc")
