"""Functions in prompts: as transformers renders them, and spelled out where no template does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.chat_template import ChatTemplate, ChatTemplateError, ChatTemplates
from router.tokens import load_codec

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather. <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Malmö"}},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "abcdefghi", "name": "get_weather"},
    {"role": "tool", "content": "13 °C", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "Mild."},
    {"role": "user", "content": "Thanks"},
]

# Written after the idioms of the families' own templates, which do not travel with this project.
QWEN_LIKE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{\\"name\\": ..}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}
{%- endif %}{%- endif %}"""
LLAMA_LIKE = """\
{{- '<|begin|>' }}{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- for call in message.tool_calls %}
{{- '<|header|>assistant\\n{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{- '}<|eot|>' }}{%- endfor %}
{%- elif message.role == 'tool' or message.role == 'ipython' %}
{{- '<|header|>ipython\\n' }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot|>' }}
{%- else %}{{- '<|header|>' + message.role + '\\n' + message.content + '<|eot|>' }}
{%- endif %}{%- endfor %}"""
MISTRAL_LIKE = """\
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if loop.last and tools is defined and tools is not none %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{%- set tool = tool.function %}
{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != 'return' %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + message['content'] }}{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_functions_are_rendered_as_transformers_does(
    template: str, tools: list[dict[str, Any]], tiny_folder: Path
) -> None:
    oracle = AutoTokenizer.from_pretrained(str(tiny_folder))
    given: list[dict[Any, Any] | Callable[..., Any]] | None = list(tools) or None
    expected = oracle.apply_chat_template(
        CONVERSATION, tools=given, chat_template=template,
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    templates = ChatTemplates(ChatTemplate(template, {}))
    assert templates.render(CONVERSATION, tools=tools) == expected
    assert ("Tells the weather. <now>" in expected) is bool(tools)
    assert "Malmö" in expected


def test_a_template_of_its_own_for_functions_is_taken_for_them(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("usual: {{ messages[0].content }}")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("{{ tools | length }}: {{ messages[0].content }}")
    codec = load_codec(tmp_path)
    assert codec.render_chat(CONVERSATION[:1]) == "usual: Weather?"
    assert codec.render_chat(CONVERSATION[:1], tools=TOOLS) == "1: Weather?"
    assert "length" in codec.tool_source


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"


def test_a_template_without_functions_has_them_in_the_system_message() -> None:
    templates = ChatTemplates(ChatTemplate(PLAIN, {}))
    call = {"name": "get_weather", "arguments": {"city": "Malmö"}}
    conversation = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    text = templates.render(conversation, tools=TOOLS)
    assert text.startswith("[system]Be brief.\n\n")
    head, _, rest = text.partition("[user]")
    assert json.dumps(TOOLS[0]["function"]) in head
    assert rest == (
        "Weather?\n"
        f"[assistant]<tool_call>{json.dumps([call, call], ensure_ascii=False)}</tool_call>\n"
        "[user]<tool_response>\n12 °C\n</tool_response>\n<tool_response>\n13 °C\n</tool_response>\n"
        "[assistant]Mild.\n[user]Thanks\n"
    )
    assert templates.render(CONVERSATION[:1], tools=TOOLS).startswith("[system]You can call")
    without = templates.render(CONVERSATION)
    assert without.startswith("[user]Weather?\n[assistant]<tool_call>[")


def test_the_clients_own_variables_reach_the_template_but_do_not_replace_what_it_is_given() -> None:
    templates = ChatTemplates(ChatTemplate(QWEN_LIKE, {}))
    thinking: dict[str, Any] = {"enable_thinking": False, "messages": [], "tools": [{"own": 1}]}
    text = templates.render(CONVERSATION[:1], tools=TOOLS, extra=thinking)
    assert text.endswith("<|im_start|>assistant\n<think></think>")
    assert "Weather?" in text
    assert "get_weather" in text
    assert '"own"' not in text


def test_developers_speak_as_the_system_where_a_model_knows_no_developers() -> None:
    conversation = [{"role": "developer", "content": "Be brief."}, *CONVERSATION[:1]]
    plain = ChatTemplates(ChatTemplate(PLAIN, {}))
    assert plain.render(conversation) == "[system]Be brief.\n[user]Weather?\n"
    assert plain.render(conversation, tools=TOOLS).startswith("[system]Be brief.\n\nYou can call")
    knows = ChatTemplates(ChatTemplate(PLAIN + "{# developer #}", {}))
    assert knows.render(conversation) == "[developer]Be brief.\n[user]Weather?\n"


def test_conversations_without_functions_are_left_alone() -> None:
    templates = ChatTemplates(ChatTemplate(PLAIN, {}))
    assert templates.render(CONVERSATION[:1]) == "[user]Weather?\n"


def test_what_a_template_cannot_bear_is_its_error() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}]
    with pytest.raises(ChatTemplateError):
        ChatTemplates(ChatTemplate(QWEN_LIKE, {})).render(CONVERSATION[:1], tools=tools)
    message = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call_1"}]}
    with pytest.raises(ChatTemplateError, match="length 9"):
        ChatTemplates(ChatTemplate(MISTRAL_LIKE, {})).render([message])
