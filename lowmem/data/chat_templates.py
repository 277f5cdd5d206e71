"""Renders a conversation as text with the tokenizer's chat template, as the model gets it in inference.

Unlike `tokenizer.apply_chat_template`, `ChatTemplate` also returns the spans marked with {% generation %}, always gives
the same date, and adapts messages to templates of vision models and of DeepSeek.
"""

import contextlib
import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lowmem.data.conversations import Conversation, Message, encodable
from lowmem.errors import InputError, first_line
from lowmem.text_files import read_text

Span = tuple[int, int]  # of characters

# Templates that ask for the date get this one, so every run reads the same text.
TODAY = datetime.date(2024, 7, 26)  # the default date in Llama's templates
_ASKS_FOR_THE_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_MARKS_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_QUESTION, _ANSWER = "a question", "an answer"


def set_chat_template(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """Sets the tokenizer's chat template, which is exported with the model, to the content of `file`. Raises InputError
    if the file cannot be read or is not a Jinja template."""
    try:
        template = read_text(Path(file)).replace("\r\n", "\n").replace("\r", "\n")
    except InputError as error:
        raise InputError(f"--chat-template {error}") from None
    except OSError as error:
        raise InputError(f"--chat-template {file}: cannot be read ({error.strerror or error})") from error
    try:
        render_jinja_template([[{"role": "user", "content": _QUESTION}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"--chat-template {file}:{error.lineno}: not a Jinja template ({error.message})") from error
    except Exception:  # the template may refuse this conversation and accept the data's
        pass
    tokenizer.chat_template = template


class ChatTemplate:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        dated = _ASKS_FOR_THE_DATE.search(str(tokenizer.chat_template))
        self.note = f" (which is told that today is {TODAY})" if dated else ""
        exchange = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        text, self._writes_answers = "", True  # stays True if it refuses this exchange
        # Templates of vision models want the content as a list of parts.
        for self._parts in (False, True):
            with contextlib.suppress(InputError):
                text, _ = self.render(Conversation("", exchange))
                self._writes_answers = _ANSWER in text
            if _QUESTION in text and _ANSWER in text:
                break
        # The text after the last answer: "" for nothing, None if unknown.
        self.end_of_turn = text.rpartition(_ANSWER)[2].strip() if _ANSWER in text else None

    def render(self, conversation: Conversation, count: int | None = None, ask: bool = False) -> tuple[str, list[Span]]:
        """Returns the text of the first `count` messages (None: all), and the spans that the template marks as
        generated. `ask` appends the generation prompt. Raises InputError if the template fails."""
        messages = conversation.messages[:count]
        try:
            return self._write(messages, conversation.tools, ask)
        except Exception as error:  # a template is a program and may raise anything
            if any("tool_calls" in message for message in messages):
                with contextlib.suppress(Exception):
                    return self._write(list(map(_with_older_tool_calls, messages)), conversation.tools, ask)
            raise InputError(
                f"{conversation.where}: the chat template refuses the conversation ({first_line(error).rstrip('.')}); "
                f"mend the row, or use --chat-template FILE with one that takes it"
            ) from error

    def question(self, text: str) -> str:
        """Renders the user message `text` and the generation prompt, which the model continues with its answer."""
        return self.render(Conversation("--sample-prompt", [{"role": "user", "content": text}]), ask=True)[0]

    def check(self, conversation: Conversation, text: str) -> None:
        """Raises InputError if `text`, the rendered `conversation`, cannot be encoded as UTF-8. Raises it, too, if the
        template has left out answers, tool calls or results of tools."""
        encodable(text, conversation.where, "the conversation")
        if not self._writes_answers or not text.strip():
            raise InputError(
                f"{conversation.where}: the chat template does not write the assistant's answers; its messages have "
                f"the keys role (system, user, assistant or tool) and content"
            )
        calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
        if calls and conversation.tools:  # the list of tools also has the names
            with contextlib.suppress(InputError):
                text, _ = self.render(replace(conversation, tools=None))
        parts = [call["function"]["name"] for call in calls]
        parts += [message.get("content", "").strip() for message in conversation.messages if message["role"] == "tool"]
        if not all(part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text for part in parts):
            raise InputError(
                f"{conversation.where}: the chat template leaves out tool calls or what the tools returned; use "
                f"--chat-template FILE with one that writes them"
            )

    def _write(self, messages: list[Message], tools: Any, ask: bool) -> tuple[str, list[Span]]:
        template = self._tokenizer.get_chat_template(tools=tools)
        template = _ASKS_FOR_THE_DATE.sub(lambda match: repr(TODAY.strftime(match[2])), template)
        marks = bool(_MARKS_GENERATION.search(template))
        texts, spans = render_jinja_template(
            [list(map(_in_parts, messages)) if self._parts else messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=ask,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], spans[0] if marks else []


def _in_parts(message: Message) -> Message:
    if not message.get("content"):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_older_tool_calls(message: Message) -> Message:
    """Returns `message` with the arguments of tool calls as JSON text, as DeepSeek's templates expect."""
    if "tool_calls" not in message:
        return message
    calls = [(call, call["function"]) for call in message["tool_calls"]]
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call, function in calls
    ]
    return {"content": None, **message, "tool_calls": calls}
