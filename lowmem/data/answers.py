"""Which part of a rendered conversation the assistant wrote: what is trained.

Where the chat template marks it with {% generation %}, it is that. Otherwise it is found by rendering less of the
conversation. Of an answer,

- `before` is the conversation up to it, with the prompt for an answer: what the model is given when it is to answer;
- `after` is the conversation up to its end;
- what `after` has beyond `before`, its end-of-turn token included, is what the model writes.

Templates may write a turn differently once others follow. Phi-3 ends the text, not the turn, with the end-of-text
token; gpt-oss ends an old turn with <|end|> and the last with <|return|>; Qwen3 and DeepSeek-R1 drop the reasoning of
old turns. A turn is then looked for where `before` ends in the whole text, and it is found if what stands there, up to
an end-of-turn token, is an ending of the turn in `after`. Where that fails, the last turn alone is trained.
"""

import itertools
import os
import re

from transformers import PreTrainedTokenizerBase

from lowmem.data.chat_templates import ChatTemplate, Span
from lowmem.data.conversations import Conversation
from lowmem.data.seams import Segments
from lowmem.errors import InputError


class Answers:
    """Finds the assistant's answers in conversations that the tokenizer's chat template writes, and counts those
    conversations of which something is not trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.template = ChatTemplate(tokenizer)
        self._last_alone = self._without_reasoning = 0
        tokens = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
        if self.template.end_of_turn and not any(token in self.template.end_of_turn for token in tokens):
            tokens.add(self.template.end_of_turn)  # another model's template: its special tokens are plain text here
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(re.escape(token) for token in longest_first if not token.isspace()))

    @property
    def notes(self) -> list[str]:
        """What has to be said of the conversations that were read."""
        alone = f"{self._last_alone:,} of them on the last answer alone, since the chat template rewrites earlier ones"
        reasoning = (
            f"the chat template leaves out the reasoning of the last answer in {self._without_reasoning:,} of them; "
            f"--chat-template FILE can give one that writes it"
        )
        return [alone] * (self._last_alone > 0) + [reasoning] * (self._without_reasoning > 0)

    def segments(self, conversation: Conversation, everything: bool) -> Segments:
        """The conversation as text; trained is what the assistant writes in answer, or `everything`. Raises InputError
        where the template refuses the conversation or hides who wrote what."""
        text, marked = self.template.render(conversation)
        self.template.check(conversation, text)
        self._without_reasoning += not all(part in text for part in conversation.last_reasoning)
        if everything:
            return [(text, True)]
        spans = self._marked(conversation, marked) or self._found(conversation, text)
        segments, start = [], 0
        for begin, end in spans:
            segments += [(text[start:begin], False), (text[begin:end], True)]
            start = end
        return [segment for segment in [*segments, (text[start:], False)] if segment[0]]

    def _marked(self, conversation: Conversation, marked: list[Span]) -> list[Span]:
        """Those of the `marked` spans that are of answers to be trained on."""
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
        self._last_alone += 1
        return turns[-1:]

    def _turn(self, conversation: Conversation, text: str, index: int) -> Span | None:
        """Where in `text` the answer `index` is, its end-of-turn token included; None where that cannot be told."""
        start = self._start(conversation, text, index)
        rendered = self._rendered(conversation, index + 1)
        if start is None or rendered is None:
            return None
        after, _ = rendered
        end = len(after) if text.startswith(after) else self._end(text, start, after)
        if end is None or end < start:
            return None
        if self.template.end_of_turn == "":
            # GLM-4: what ends a turn in inference is the token that begins the next one.
            stop = self._special.search(text, end)
            end = stop.end() if stop and not text[end : stop.start()].strip() else end
        return start, end

    def _start(self, conversation: Conversation, text: str, index: int) -> int | None:
        asked, unasked = (self._rendered(conversation, index, ask) for ask in (True, False))
        if asked and text.startswith(asked[0]):
            return len(asked[0])
        if not asked or not unasked or not text.startswith(unasked[0]):
            return None
        return self._agreement(asked[0], text)  # the prompt begins a reasoning, which old turns are without

    def _end(self, text: str, start: int, after: str) -> int | None:
        """The end of the turn that begins at `start`: the text up to some special token is an ending of the turn in
        `after`, but for special tokens. Those that follow it in both are part of it, or else the first in `text`."""
        if not after.startswith(text[:start]):
            return None
        turn = after[start:]
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
        """How many characters the two have in common at their beginning, special tokens counted whole."""
        length = len(os.path.commonprefix([one, other]))
        cut = next((token for token in self._special.finditer(one) if token.start() < length < token.end()), None)
        return cut.start() if cut else length

    def _rendered(self, conversation: Conversation, count: int, ask: bool = False) -> tuple[str, list[Span]] | None:
        """The first `count` messages as text; None where the template refuses them without the others."""
        try:
            return self.template.render(conversation, count, ask)
        except InputError:
            return None
