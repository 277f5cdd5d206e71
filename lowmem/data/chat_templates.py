"""What of a conversation the assistant wrote, once a chat template has made one text of it.

A chat template is a Jinja program that belongs to the tokenizer; its text is what the model is given in inference. It
does not say which of its characters are the assistant's, unless its author marked them with {% generation %}; then
those are trained. Otherwise they are found by rendering less of the conversation. Of an answer,

- `before` is the conversation up to it, with the prompt for an answer: what the model is given when it is to answer;
- `after` is the conversation up to its end;
- what `after` has beyond `before`, its end-of-turn token included, is what the model writes.

Templates may write a turn differently once others follow. Phi-3 ends the text, not the turn, with the end-of-text
token; gpt-oss ends an old turn with <|end|> and the last with <|return|>; Qwen3 and DeepSeek-R1 drop the reasoning of
old turns. A turn is then looked for where `before` ends in the whole text, and it is found if what stands there, up to
an end-of-turn token, is an ending of the turn in `after`. Where that fails, the last turn alone is trained.

Training again must read the same text on any day, so templates that ask for today's date are always told the same one.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lowmem.data.conversations import Conversation, Message, encodable
from lowmem.errors import InputError, first_line

Segments = list[tuple[str, bool]]  # (text, whether it is trained)
Span = tuple[int, int]  # of characters

TODAY = datetime.date(2024, 7, 26)  # the date that Llama's templates take where they cannot ask for one
_ASKS_FOR_THE_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_MARKS_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_WAYS_OUT = "use --train-on all, or --chat-template FILE with {% generation %} around what the assistant writes"


def set_chat_template(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """Give the tokenizer the template in `file`; it is exported with the model. Raises InputError."""
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {file}: cannot be read ({getattr(error, 'strerror', error)})") from error
    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"--chat-template {file}:{error.lineno}: not a Jinja template ({error.message})") from error
    except Exception:  # whether it suits the conversations is known when there are some
        pass
    tokenizer.chat_template = template


class ChatTemplate:
    """The chat template of `tokenizer`. `last_turn_alone` counts the conversations that were trained on so."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        tokens = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self.special = re.compile("|".join(re.escape(token) for token in longest_first if not token.isspace()))
        self.last_turn_alone = 0
        dated = _ASKS_FOR_THE_DATE.search(str(tokenizer.chat_template))
        self.note = f" (which is told that today is {TODAY})" if dated else ""
        exchange = Conversation("", [_said("user", "a question"), _said("assistant", "an answer")])
        for self.parts in (False, True):  # templates of models that see take content in lists of parts alone
            written = self._rendered(exchange, 2)
            if written and "a question" in written[0] and "an answer" in written[0]:
                break
        # GLM-4 ends no turn: what ends it in inference is the token that begins the next, so that one is trained.
        self.open_ended = bool(written) and written[0].rstrip().endswith("an answer")

    def segments(self, conversation: Conversation, everything: bool) -> Segments:
        """The conversation as text; trained is what the assistant writes in answer, or `everything`. Raises InputError
        where the template refuses the conversation or hides who wrote what."""
        text, marked = self._render(conversation)
        encodable(text, conversation.where, "the conversation")
        self._check_tools(conversation, text)
        if everything:
            return [(text, True)]
        spans = self._marked(conversation, marked) or self._found(conversation, text)
        segments, start = [], 0
        for begin, end in spans:
            segments += [(text[start:begin], False), (text[begin:end], True)]
            start = end
        return [segment for segment in [*segments, (text[start:], False)] if segment[0]]

    def _marked(self, conversation: Conversation, marked: list[Span]) -> list[Span]:
        """The spans between {% generation %} and {% endgeneration %} that are not of messages that were given."""
        if len(conversation.answers) == sum(message["role"] == "assistant" for message in conversation.messages):
            return marked
        given = 0
        spans = []
        for index in range(len(conversation.messages)):
            through = self._rendered(conversation, index + 1)
            count = len(through[1]) if through else given
            spans += marked[given:count] if index in conversation.answers else []
            given = max(given, count)
        return spans

    def _found(self, conversation: Conversation, text: str) -> list[Span]:
        turns = [self._turn(conversation, text, index) for index in conversation.answers]
        if None not in turns and all(turn[1] <= following[0] for turn, following in itertools.pairwise(turns)):
            return turns
        if turns[-1] is None:
            raise InputError(
                f"{conversation.where}: the chat template rewrites earlier turns, so the assistant's tokens "
                f"cannot be told from the others; {_WAYS_OUT}"
            )
        self.last_turn_alone += 1
        return turns[-1:]

    def _turn(self, conversation: Conversation, text: str, index: int) -> Span | None:
        """Where in `text` the answer `index` is, its end-of-turn token included; None where that cannot be told."""
        start = self._start(conversation, text, index)
        after = self._rendered(conversation, index + 1)
        if start is None or after is None:
            return None
        end = len(after[0]) if text.startswith(after[0]) else self._end(text, start, after[0])
        if end is None or end < start:
            return None
        if self.open_ended and (stop := self.special.search(text, end)) and not text[end : stop.start()].strip():
            end = stop.end()
        return start, end

    def _start(self, conversation: Conversation, text: str, index: int) -> int | None:
        before = self._rendered(conversation, index, ask=True)
        if before is None:
            return None
        if text.startswith(before[0]):
            return len(before[0])
        unasked = self._rendered(conversation, index)
        if unasked is None or not text.startswith(unasked[0]):
            return None
        return self._agreement(before[0], text)  # the prompt begins a reasoning, which old turns are without

    def _end(self, text: str, start: int, after: str) -> int | None:
        """The end of the turn that begins at `start`: the text up to some special token is an ending of the turn in
        `after`, but for special tokens. Those that follow it in both are part of it, or else the first in `text`."""
        if not after.startswith(text[:start]):
            return None
        for token in self.special.finditer(text, start):
            said = text[start : token.start()].rstrip()
            if not said:
                continue
            ending = after[after.rfind(said, start) + len(said) :]
            if said in after[start:] and not self.special.sub("", ending).strip():
                said_end = start + len(said)
                return max(token.end(), said_end + self._agreement(ending, text[said_end:]))
        return None

    def _agreement(self, one: str, other: str) -> int:
        """How many characters the two have in common at their beginning, special tokens counted whole."""
        length = len(os.path.commonprefix([one, other]))
        cut = next((token for token in self.special.finditer(one) if token.start() < length < token.end()), None)
        return cut.start() if cut else length

    def _check_tools(self, conversation: Conversation, text: str) -> None:
        """Raises InputError where the template leaves out calls of tools or what they returned: many know none."""
        calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
        if calls and conversation.tools:
            listed = self._rendered(replace(conversation, tools=None), len(conversation.messages))
            text = listed[0] if listed else text  # where names are not there merely because the tools are listed
        parts = [call["function"]["name"] for call in calls]
        parts += [message["content"].strip() for message in conversation.messages if message["role"] == "tool"]
        if not all(part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text for part in parts):
            raise InputError(
                f"{conversation.where}: the chat template leaves out tool calls or what the tools returned; use "
                f"--chat-template FILE with one that writes them"
            )

    def _rendered(self, conversation: Conversation, count: int, ask: bool = False) -> tuple[str, list[Span]] | None:
        """The first `count` messages as text; None where the template refuses them without the others."""
        try:
            return self._render(conversation, count, ask)
        except InputError:
            return None

    def _render(
        self, conversation: Conversation, count: int | None = None, ask: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as text, and the spans of it that the template marks as generated."""
        messages = conversation.messages[:count]
        try:
            return self._write(messages, conversation.tools, ask)
        except Exception as error:  # a template is a program of the model's author; it raises what it likes
            if any("tool_calls" in message for message in messages):
                with contextlib.suppress(Exception):
                    return self._write(
                        [_with_older_tool_calls(message) for message in messages], conversation.tools, ask
                    )
            raise InputError(
                f"{conversation.where}: the chat template refuses the conversation ({first_line(error).rstrip('.')}); "
                f"mend the row, or use --chat-template FILE with one that takes it"
            ) from error

    def _write(self, messages: list[Message], tools: Any, ask: bool) -> tuple[str, list[Span]]:
        if self.parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if message.get("content")
                else message
                for message in messages
            ]
        template = self.tokenizer.get_chat_template(tools=tools)
        template = _ASKS_FOR_THE_DATE.sub(lambda match: repr(TODAY.strftime(match[2])), template)
        marks = bool(_MARKS_GENERATION.search(template))
        texts, spans = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=ask,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], spans[0] if marks else []


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_older_tool_calls(message: Message) -> Message:
    """`message` as DeepSeek's templates read it: arguments as text, and a content of None beside tool calls."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {"content": None, **message, "tool_calls": calls}
