"""Which format a model writes calls in, from what its folder says."""

from collections.abc import Callable

from router.tools.formats import FormatName


def detect_format(template: str, model_type: str, knows: Callable[[str], bool]) -> FormatName:
    """The one that its chat template shows it, else its family's.

    `model_type` is that of `config.json`; `knows` says whether the vocabulary has a special token.
    A model that was taught none gets Hermes' form, in which its prompt then explains calls.
    """
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama3_json"
    if template:
        return "hermes"
    if model_type.startswith("mistral") and knows("[TOOL_CALLS]"):
        return "mistral"
    if model_type in ("llama", "mllama") and knows("<|python_tag|>"):
        return "llama3_json"
    return "hermes"
