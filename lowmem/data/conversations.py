"""Reads conversations from a data set's rows, as messages for chat templates: {"role": ..., "content": ...}.

Tool calls get one form; other keys, such as `name`, stay as they are. docs/data.md lists the accepted forms.
"""

from dataclasses import dataclass
from typing import Any

from lowmem.data.records import Record
from lowmem.data.tables import SYSTEM_COLUMNS
from lowmem.errors import InputError
from lowmem.text_files import parse_json

Message = dict[str, Any]

_ROLES = {  # other names of roles, in lower case and without a colon at the end
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", "bard", "bing"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function", "tool_response", "ipython"), "tool"),
    "developer": "system",
}
_KEPT_IF_NAMED = ("developer", "ipython")  # Kept as written if the template names them: it may use the synonym, too.
_CALLS = ("function_call", "tool_call")  # The text of these roles is function calls in JSON.
_TRAINED = ("loss", "train", "training", "weight")  # Keys that say whether an answer is trained on.
_NOT_TRAINED, _IS_TRAINED = (0, False, "0", "false"), (None, 1, True, "1", "true")  # Values of these keys.
_REASONING = ("reasoning_content", "thinking", "reasoning")  # The names in transformers.


class UntrainableRow(InputError):
    """Is raised for a row with nothing to train on, such as a conversation without an answer."""


@dataclass(frozen=True)
class Conversation:
    """Holds one conversation, and the `tools` that its messages may call. `where`: file and row. `given`: number of
    messages at the start that are never trained on."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    given: int = 0

    @property
    def answers(self) -> list[int]:
        """Returns the indices of the assistant's messages that are trained on."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant"
            and index >= self.given
            and not any(message.get(name) in _NOT_TRAINED for name in _TRAINED)
        ]

    @property
    def optional(self) -> dict[str, list[str]]:
        """Returns {description: texts} for parts of the conversation that a chat template may leave out."""
        tools = [tool.get("function", tool) for tool in self.tools or ()]
        return {
            "the reasoning of the last answer": self._last_reasoning,
            "the system message": [
                message.get("content", "").strip() for message in self.messages if message["role"] == "system"
            ],
            "the list of tools": [str(tool["name"]) for tool in tools if isinstance(tool, dict) and "name" in tool],
        }

    @property
    def _last_reasoning(self) -> list[str]:
        message = self.messages[self.answers[-1]] if self.answers else {}
        thoughts = [message[name] for name in _REASONING if isinstance(message.get(name), str)]
        within, ended, _ = message.get("content", "").rpartition("</think>")
        thoughts += [within.rpartition("<think>")[2]] if ended else []
        return [thought.strip() for thought in thoughts]


def read_conversation(record: Record, columns: tuple[str, ...], template: str = "") -> Conversation:
    """Reads a conversation from one or two columns (prompt, completion). Of two, only the second is trained on. Raises
    InputError for a malformed message, or for an unknown role that the chat `template` does not name."""
    first, *rest = (_messages(record, column, template) for column in columns)
    if (text := system_text(record)) and not (first and first[0]["role"] in ("system", "developer")):
        first = [{"role": "system", "content": text}, *first]
    return Conversation(record.where, [*first, *sum(rest, [])], _tools(record), len(first) if rest else 0)


def system_text(record: Record) -> str:
    """Returns the text of the row's system column, or "". Raises InputError if several of SYSTEM_COLUMNS differ."""
    filled = {name: string(record, name) for name in SYSTEM_COLUMNS if record.columns.get(name)}
    if len({*filled.values()}) > 1:
        raise InputError(f"{record.where}: {' and '.join(filled)} hold different texts; keep one of them")
    return next(iter(filled.values()), "")


def string(record: Record, column: str) -> str:
    """Returns the text in a row's `column`. Raises UntrainableRow if it is null, InputError if it is no valid text."""
    value = record.columns[column]
    if value is None:
        raise UntrainableRow(f"{record.where}: {column} is empty (null); remove the row")
    if not isinstance(value, str):
        raise InputError(f"{record.where}: {column} must be text, not {type(value).__name__}")
    return encodable(value, record.where, column)


def parse_within(text: str, place: str, this_is: str) -> Any:
    """Returns the value of the JSON `text`. Raises InputError "{place}: {this_is} not JSON". `place`: file and row.
    `this_is`: such as "tools is"."""
    try:
        return parse_json(text, "line")
    except InputError as error:
        raise InputError(f"{place}: {this_is} not JSON ({error})") from None


def encodable(text: str, where: str, name: str) -> str:
    """Returns `text`. If UTF-8 cannot encode it, raises InputError "{where}: {name} holds half a surrogate pair"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {name} holds half a surrogate pair ({text[error.start]!r}), which is no "
            f"character; write the character itself"
        ) from error
    return text


def _messages(record: Record, column: str, template: str) -> list[Message]:
    values = record.columns.get(column)
    if values is None:
        raise UntrainableRow(f"{record.where}: {column} is empty (null); remove the row")
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputError(f"{record.where}: {column} must be a list of objects with the texts role and content")
    return [
        _message(value, f"{record.where}: {column}, message {number}", template)
        for number, value in enumerate(values, 1)
    ]


def _message(value: dict[str, Any], place: str, template: str) -> Message:
    message = {key: item for key, item in value.items() if item is not None}
    said, content = _either(message, "role", "from", place), _either(message, "content", "value", place)
    message.pop("content", None)
    if not isinstance(said, str):
        raise InputError(f"{place}: there is no role; write who says it: system, user, assistant or tool")
    message["role"] = _role(said, place, template)
    for name in _TRAINED:
        if (weight := message.get(name)) not in (*_NOT_TRAINED, *_IS_TRAINED):
            raise InputError(f"{place}: {name} is {weight!r}; an answer is trained on (1 or true) or not (0 or false)")
    called = message.pop("function_call", None)
    if _plain(said) in _CALLS:
        called, content = content, None
    if called and not (isinstance(called, dict) and not any(called.values())):  # tables fill missing keys with null
        message["tool_calls"] = [{"function": call} for call in _objects(called, place, "function_call")]
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, place) for call in _objects(message["tool_calls"], place, "tool_calls")]
    elif content is None:
        raise UntrainableRow(f"{place}: there is no content; write the text that is said")
    else:
        message.pop("tool_calls", None)
    if content is not None:
        message["content"] = encodable(_text(content, place), place, "content")
    return message


def _either(message: Message, name: str, other: str, place: str) -> Any:
    value = message.pop(other, None)
    if value is not None and message.get(name, value) != value:
        raise InputError(f"{place}: {name} and {other} differ; keep one of them")
    return message.get(name, value)


def _role(said: str, place: str, template: str) -> str:
    plain = _plain(said)
    named = f"'{said}'" in template or f'"{said}"' in template
    if plain in _ROLES and not (named and said in _KEPT_IF_NAMED):
        return _ROLES[plain]
    if not named:
        raise InputError(
            f"{place}: the role {said!r} is not known; write system, user, assistant or tool, or give --chat-template "
            f"FILE with one that names it"
        )
    return said


def _plain(said: str) -> str:
    return said.strip().rstrip(":").rstrip().lower()


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
    """Returns a tool call with its arguments as a dict, as most chat templates expect. Parses them if they are JSON
    text, as in OpenAI's format. Raises InputError for a malformed call; the message begins with `place`."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(
            f'{place}: a tool call must be an object such as {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_within(arguments or "{}", place, f"the arguments of {function['name']} are")
    others = {key: item for key, item in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _objects(value: Any, place: str, name: str) -> list[dict[str, Any]]:
    """Returns `value`, a list of dicts, one dict, or JSON text of either, as a list. Raises InputError for others; the
    message begins with `place` and `name`."""
    if isinstance(value, str):
        value = parse_within(value, place, f"{name} is")
    values = [value] if isinstance(value, dict) else value
    if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
        raise InputError(f"{place}: {name} must be a list of objects")
    return values


def _tools(record: Record) -> list[dict[str, Any]] | None:
    tools, functions = record.columns.get("tools"), record.columns.get("functions")
    if tools:
        return _objects(tools, record.where, "tools") or None
    listed = _objects(functions, record.where, "functions") if functions else []
    return [{"type": "function", "function": function} for function in listed] or None
