"""From a row to a conversation: messages as the chat templates of Hugging Face's models expect them.

A message is {"role": ..., "content": ...}; its role is system, user, assistant or tool. What else it holds
(`tool_calls`, `tool_call_id`, `name`, `reasoning_content`) is handed to the template as it is. Three ways of writing
conversations are understood:

| columns | whose |
|---|---|
| `messages`; `content` a text or a list of parts, {"type": "text", "text": ...}; `tool_calls`, `weight` 0 | OpenAI's |
| `conversations` of `from` and `value` (or of `role` and `content`), and a `system` text beside it | ShareGPT's |
| `prompt` and `completion`, both lists of messages | TRL's |

A column `tools` beside them lists the functions that may be called, as JSON schemas or as that list written as text.
"""

import json
from dataclasses import dataclass
from typing import Any

from lowmem.data.sources import Record
from lowmem.errors import InputError

Message = dict[str, Any]

_ROLES = {  # what ShareGPT's users call them
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"},
    **{"function_call": "assistant", "tool_call": "assistant"},
    **{"observation": "tool", "function_response": "tool", "function": "tool", "tool_response": "tool"},
}
_CALLS = ("function_call", "tool_call")  # roles whose text is a call of a function, or a list of them, in JSON
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows


class UntrainableRow(InputError):
    """A row with nothing to learn from: an empty text or completion, a conversation without an answer."""


@dataclass(frozen=True)
class Conversation:
    """`where` it was read is said in errors. `given`: how many of the first messages are not trained on, whoever wrote
    them."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    given: int = 0

    @property
    def answers(self) -> list[int]:
        """The places among the messages of those that are trained on."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index >= self.given and message.get("weight") != 0
        ]

    @property
    def last_reasoning(self) -> list[str]:
        """What the assistant thought before the last answer, if the row says so: between <think> and </think>, or
        apart."""
        message = self.messages[self.answers[-1]] if self.answers else {}
        thoughts = [message[name] for name in _REASONING if isinstance(message.get(name), str)]
        within, ended, _ = message.get("content", "").rpartition("</think>")
        thoughts += [within.rpartition("<think>")[2]] if ended else []
        return [thought.strip() for thought in thoughts]


def read_conversation(record: Record, column: str) -> Conversation:
    """The conversation in the column `messages` or `conversations`. Raises InputError."""
    messages = _messages(record, column)
    system = record.columns.get("system")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": encodable(system, record.where, "system")}, *messages]
    return Conversation(record.where, messages, _tools(record))


def read_prompt_and_completion(record: Record) -> Conversation:
    """The conversation of which `prompt` lists the messages that are given, and `completion` those that answer."""
    prompt = _messages(record, "prompt")
    return Conversation(record.where, prompt + _messages(record, "completion"), _tools(record), len(prompt))


def encodable(text: str, where: str, name: str) -> str:
    """`text`, if it can be written as UTF-8; raises InputError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {name} holds half a surrogate pair ({text[error.start]!r}), which is no "
            f"character; write the character itself"
        ) from error
    return text


def _messages(record: Record, column: str) -> list[Message]:
    values = record.columns.get(column)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputError(f"{record.where}: {column} must be a list of objects with the texts role and content")
    return [_message(value, f"{record.where}: {column}, message {index}") for index, value in enumerate(values, 1)]


def _message(value: dict[str, Any], place: str) -> Message:
    """`value` with the keys and roles that chat templates read, and without those whose value is null."""
    message = {key: item for key, item in value.items() if item is not None}
    said = message.pop("from", None)
    said = message.setdefault("role", said)
    content = message.pop("value", None)
    content = message.pop("content", content)
    if not isinstance(said, str):
        raise InputError(f"{place}: there is no role; write who says it: system, user, assistant or tool")
    message["role"] = _ROLES.get(said, said)
    if said in _CALLS:
        message["tool_calls"], content = [{"function": call} for call in _listed(content, place, said)], None
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        if content is None:
            raise InputError(f"{place}: there is no content; write the text that is said")
    else:
        message["tool_calls"] = [_call(call, place) for call in _listed(message["tool_calls"], place, "tool_calls")]
    if content is not None:
        message["content"] = encodable(_text(content, place), place, "content")
    return message


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{place}: content must be text or a list of parts, not {type(content).__name__}")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
            raise InputError(f"{place}: a part of kind {kind} is not text, and nothing else is trained on; remove it")
    return "".join(part["text"] for part in content)


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """One tool call with its arguments as an object: OpenAI writes them as text, chat templates write objects out."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(
            f'{place}: a tool call must be an object such as {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InputError(f"{place}: the arguments of {function['name']} are not JSON ({error})") from error
    kept = {key: item for key, item in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _listed(value: Any, place: str, name: str) -> list[dict[str, Any]]:
    """A list of objects, which may be written as text, as may one alone."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{place}: {name} is not JSON ({error})") from error
    values = [value] if isinstance(value, dict) else value
    if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
        raise InputError(f"{place}: {name} must be a list of objects")
    return values


def _tools(record: Record) -> list[dict[str, Any]] | None:
    tools = record.columns.get("tools")
    return _listed(tools, record.where, "tools") or None if tools else None
