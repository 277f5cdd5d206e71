"""Finds the assistant's answers in a conversation rendered by a chat template, for the loss mask.

A template may mark answers with {% generation %}. If it does not, the conversation is rendered up to an answer, and
again with the answer. The text that the second rendering adds is the answer. docs/data.md lists the exceptions.
"""

import itertools
import os
import re
from collections import Counter

from transformers import PreTrainedTokenizerBase

from lowmem.data.chat_templates import ChatTemplate, Span
from lowmem.data.conversations import Conversation
from lowmem.data.seams import Segments
from lowmem.errors import InputError


class Answers:
    """Renders conversations with the tokenizer's chat template, and finds the assistant's answers in the texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.template = ChatTemplate(tokenizer)
        self._last_only, self._left_out = 0, Counter()
        self._end_of_text = tokenizer.eos_token
        tokens = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
        if self.template.end_of_turn and not any(token in self.template.end_of_turn for token in tokens):
            tokens.add(self.template.end_of_turn)  # another model's template: its special tokens are plain text here
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(re.escape(token) for token in longest_first if not token.isspace()))

    @property
    def notes(self) -> list[str]:
        """Returns remarks for the log: in how many conversations the chat template rewrites or leaves out parts."""
        last = f"only the last answer of {self._last_only:,} of them, since the chat template rewrites earlier ones"
        left_out = [
            f"the chat template leaves out {name} in {count:,} of them; --chat-template FILE can give another"
            for name, count in self._left_out.items()
        ]
        return [last] * (self._last_only > 0) + left_out

    def segments(self, conversation: Conversation, everything: bool) -> Segments:
        """Renders `conversation` as segments, (text, True if trained on). Only answers are trained on, or all text if
        `everything`. Raises InputError if the answers cannot be found."""
        text, marked = self.template.render(conversation)
        self.template.check(conversation, text)
        self._left_out.update(name for name, parts in conversation.optional.items() if not all(map(text.count, parts)))
        if everything:
            return [(text, True)]
        spans = self._marked(conversation, marked)
        if all(begin == end for begin, end in spans):  # none is marked, or a template's marks are around nothing
            spans = self._found(conversation, text)
        if not text[spans[-1][1] :].strip() and not text.rstrip().endswith(self._end_of_text):
            spans[-1] = spans[-1][0], len(text)  # the end-of-text token that follows is trained on
        segments, start = [], 0
        for begin, end in spans:
            segments += [(text[start:begin], False), (text[begin:end], True)]
            start = end
        return [segment for segment in [*segments, (text[start:], False)] if segment[0]]

    def _marked(self, conversation: Conversation, marked: list[Span]) -> list[Span]:
        if len(conversation.answers) == sum(message["role"] == "assistant" for message in conversation.messages):
            return marked
        spans, seen = [], 0
        for index in range(len(conversation.messages)):
            through = self._rendered(conversation, index + 1)
            count = len(through[1]) if through else seen
            spans += marked[seen:count] if index in conversation.answers else []
            seen = max(seen, count)
        return spans

    def _found(self, conversation: Conversation, text: str) -> list[Span]:
        turns = [self._turn(conversation, text, index) for index in conversation.answers]
        if None not in turns and all(turn[1] <= following[0] for turn, following in itertools.pairwise(turns)):
            return turns
        if turns[-1] is None:
            raise InputError(
                f"{conversation.where}: the chat template rewrites earlier turns, so the assistant's tokens cannot be "
                f"told from the others; use --train-on all, or --chat-template FILE with {{% generation %}} around "
                f"what the assistant writes"
            )
        self._last_only += 1
        return turns[-1:]

    def _turn(self, conversation: Conversation, text: str, index: int) -> Span | None:
        """Returns the span in `text` of the answer `messages[index]`, with its end-of-turn token; None if not found."""
        start = self._start(conversation, text, index)
        rendered = self._rendered(conversation, index + 1)
        if start is None or rendered is None:
            return None
        after, _ = rendered
        end = len(after) if text.startswith(after) else self._end(text, start, after)
        if end is None or end < start:
            return None
        if self.template.end_of_turn == "":
            # GLM-4: in inference, the token that begins the next turn ends this one.
            stop = self._special.search(text, end)
            end = stop.end() if stop and not text[end : stop.start()].strip() else end
        return start, end

    def _start(self, conversation: Conversation, text: str, index: int) -> int | None:
        asked, unasked = (self._rendered(conversation, index, ask) for ask in (True, False))
        if asked and text.startswith(asked[0]):
            return len(asked[0])
        if not asked or not unasked or not text.startswith(unasked[0]):
            return None
        return self._agreement(asked[0], text)  # the prompt begins a reasoning, which old turns do not have

    def _end(self, text: str, start: int, after: str) -> int | None:
        """Returns the index in `text` at which the answer that begins at `start` ends, or None if it is not found.
        `after`: the conversation rendered up to the end of this answer."""
        if not after.startswith(text[:start]):
            return None
        turn = after[start:]
        # The answer includes the first special token after its words, and all characters that follow the words in both
        # texts.
        for token in self._special.finditer(text, start):
            said = text[start : token.start()].rstrip()
            place = turn.rfind(said)
            if place < 0:
                return None
            ending = turn[place + len(said) :]
            if said and not self._special.sub("", ending).strip():
                said_end = start + len(said)
                return max(token.end(), said_end + self._agreement(ending, text[said_end:]))
        return None

    def _agreement(self, one: str, other: str) -> int:
        """Returns the length of the longest common prefix that does not end inside a special token."""
        length = len(os.path.commonprefix([one, other]))
        cut = next((token for token in self._special.finditer(one) if token.start() < length < token.end()), None)
        return cut.start() if cut else length

    def _rendered(self, conversation: Conversation, count: int, ask: bool = False) -> tuple[str, list[Span]] | None:
        try:
            return self.template.render(conversation, count, ask)
        except InputError:
            return None
