"""Text to tokens and back: the model folder's tokenizer, chat template and end-of-sequence ids.

Uses the `tokenizers` library itself: transformers' loader imports torch, which costs a router
300 MB and two seconds for nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.model_folder import end_token_ids, read_json, read_tokenizer, special_tokens
from router.byte_tokens import byte_table
from router.chat_template import ChatTemplate, ChatTemplateError, ChatTemplates

INLINE_CHARACTERS = 16_384
"""Longer texts are tokenised in a thread, so that other requests go on meanwhile."""


class UnusableModelFolder(ValueError):
    """The model's folder has no usable tokenizer; says what is missing."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's `generation_config.json` says of sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the router knows of the model beside its tokenizer."""

    root: str
    """The folder."""
    vocab_size: int
    """Token ids the engine takes are below this."""
    max_model_len: int
    """The model's own limit; nodes may allow less."""
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    model_type: str = ""
    """The architecture's name in `config.json`."""


class TextCodec:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates | None) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.byte_table = byte_table(tokenizer, self.special_ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Without offsets, of which nothing here has a use: a quarter less work.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def token_id(self, text: str) -> int | None:
        """The id of a token of that very text."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids without a token have no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are only a part of a character."""
        if self.byte_table is not None:
            known = 0 <= token_id < len(self.byte_table.bytes)
            return self.byte_table.bytes[token_id] if known else b""
        text = self.decode([token_id])
        if "\ufffd" not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return text.encode()

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        if self._templates is None:
            raise ChatTemplateError("the model has no chat template; use /v1/completions")
        return self._templates.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra
        )

    @property
    def tool_source(self) -> str:
        """The chat template that shows the model functions; empty if there is none."""
        return "" if self._templates is None else self._templates.tool_source

    def special_id(self, text: str) -> int | None:
        """Of a special token."""
        id_ = self.token_id(text)
        return id_ if id_ in self.special_ids else None


def load_codec(folder: Path) -> TextCodec:
    """Read tokenizer and chat template of a model's folder.

    Raises:
        UnusableModelFolder: there is no `tokenizer.json`, or it or the template is broken.
    """
    try:
        tokenizer = read_tokenizer(folder)
    except ValueError as error:
        raise UnusableModelFolder(f"{folder / 'tokenizer.json'}: {error}") from error
    if tokenizer is None:
        raise UnusableModelFolder(f"{folder} has no tokenizer.json")
    try:
        templates = _templates(folder)
    except ChatTemplateError as error:
        raise UnusableModelFolder(f"{folder}: {error}") from error
    return TextCodec(tokenizer, templates)


def load_model_info(folder: Path, codec: TextCodec) -> ModelInfo:
    """Read what the model's configuration files say."""
    config = read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = read_json(folder / "generation_config.json")
    return ModelInfo(
        root=str(folder),
        vocab_size=int(config.get("vocab_size", codec.vocab_size)),
        max_model_len=int(config.get("max_position_embeddings", 2048)),
        eos_token_ids=end_token_ids(folder, codec.token_id),
        model_type=str(config.get("model_type", "")),
        defaults=SamplingDefaults(
            **{name: generation.get(name) for name in SamplingDefaults.__dataclass_fields__}
        ),
    )


def _templates(folder: Path) -> ChatTemplates | None:
    """Raises ChatTemplateError when one is broken."""
    given = read_json(folder / "tokenizer_config.json").get("chat_template")
    sources = {"default": given}
    if isinstance(given, list):  # several named templates
        sources = {entry["name"]: entry["template"] for entry in given}
    named = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    sources |= {name: path.read_text() for name, path in named.items() if path.is_file()}
    tokens = special_tokens(folder)
    templates = {
        name: ChatTemplate(source, tokens)
        for name, source in sources.items()
        if isinstance(source, str) and name in named
    }
    usual = templates.get("default")
    return None if usual is None else ChatTemplates(usual, templates.get("tool_use"))
