"""Functions for a chat template that knows none: told in the system message, in Hermes' form.

system     what it said, then the functions and how to call them
assistant  what it said, then <tool_call>[{"name": .., "arguments": ..}, ..]</tool_call>
user       <tool_response>..</tool_response> for each result; such templates know no role `tool`
"""

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """\
You can call functions. Those there are, as JSON with a JSON schema of their parameters:
<tools>
{tools}
</tools>
When the user's wish needs one or more of them, answer with nothing but a list of calls, like this:
<tool_call>[{{"name": "a function's name", "arguments": {{"a parameter": "a value"}}}}]</tool_call>
What they return comes back to you between <tool_response> and </tool_response>. When no function \
is needed, answer in words."""


def spell_out(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation without functions."""
    spelled: list[dict[str, Any]] = []
    answers = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answers:
                spelled[-1]["content"] += f"\n{text}"
            else:
                spelled.append({"role": "user", "content": text})
            answers = True
            continue
        answers = False
        spelled.append(_with_calls(message) if "tool_calls" in message else message)
    return _introduced(spelled, tools) if tools else spelled


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message["tool_calls"]
    ]
    text = f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>"
    said = message["content"]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": f"{said}\n{text}" if said else text}


def _introduced(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
