"""The router's own reading of a model's folder agrees with transformers'."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from router.chat_template import ChatTemplate, ChatTemplateError
from router.tokens import UnusableModelFolder, load_codec, load_model_info

MESSAGES = [
    {"role": "user", "content": "Hello there, how are you? <|im_end|> 👍"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": " and\n\nnow?"},
]


@pytest.mark.parametrize("folder_fixture", ["tiny_folder", "default_folder"])
def test_it_agrees_with_transformers(folder_fixture: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(folder_fixture)
    codec, oracle = load_codec(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in ("Hello world", " two  spaces", "日本語 <|im_start|>", "tabs\t\n"):
        ids = codec.encode_now(text)
        assert ids == oracle.encode(text)
        assert codec.decode(ids) == oracle.decode(ids)
        assert codec.decode(ids, skip_special_tokens=True) == oracle.decode(
            ids, skip_special_tokens=True
        )
    for prompt in (True, False):
        assert codec.render_chat(MESSAGES, add_generation_prompt=prompt) == (
            oracle.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        )
    info = load_model_info(folder, codec)
    assert oracle.eos_token_id in info.eos_token_ids


def test_the_router_process_never_loads_torch() -> None:
    code = "import router.app, sys; sys.exit('torch' in sys.modules or 'nixl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_templates_may_refuse_and_cannot_reach_out() -> None:
    with pytest.raises(ChatTemplateError, match="no system"):
        ChatTemplate("{{ raise_exception('no system') }}", {}).render([])
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.append(1) }}", {}).render([])
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"content": "a"}])


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnusableModelFolder, match=r"no tokenizer\.json"):
        load_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableModelFolder):
        load_codec(tmp_path)


def test_generation_config_names_ends_and_defaults(tiny_folder: Path, tmp_path: Path) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2], "top_k": 7}')
    info = load_model_info(tmp_path, load_codec(tmp_path))
    assert info.eos_token_ids == (0, 2)
    assert (info.defaults.top_k, info.defaults.top_p) == (7, None)
    assert (info.vocab_size, info.max_model_len) == (300, 512)


def test_bytes_of_tokens_add_up_to_the_text(tiny_folder: Path) -> None:
    codec = load_codec(tiny_folder)
    text = "the 👍 page"
    assert b"".join(codec.token_bytes(id_) for id_ in codec.encode_now(text)) == text.encode()
