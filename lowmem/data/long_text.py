"""Tokenizes a text that is too long to tokenize at once, in bounded memory.

Cuts the text into windows that overlap, and tokenizes each. Joins the tokens of two windows inside their overlap, in
the middle of a sequence of tokens that both have. docs/data.md says why the result is exact.
"""

import itertools
from collections.abc import Callable

import numpy as np

WINDOW, OVERLAP = 2**16, 2**10  # characters; WordPiece's longest word (100) must be shorter than an overlap
_AT_ONCE = 16  # at most so many windows are tokenized together
_SHIFTS, _SHIFTS_TRIED = 128, 4  # earlier begins that are tried: by overlap, by whole window

Tokens = np.ndarray  # int32 [tokens, 1 or 3]: the id, and perhaps the token's begin and end in characters


class LongText:
    """Tokenizes one text that is added in pieces. Does so by windows, parts of the text that overlap. `encode`:
    tokenizes a list of texts. `word_starts`: the characters with which a window may begin; None: any character."""

    def __init__(self, encode: Callable[[list[str]], list[Tokens]], word_starts: str | None = None):
        self._encode, self._word_starts = encode, word_starts
        self._text = ""  # begins with the last window
        self._before = 0  # number of the text's characters before _text
        self._window: Tokens | None = None  # tokens of the last window; None until its text is complete
        self._end = WINDOW  # index in _text at which the last window ends
        self._given = 0  # number of the last window's tokens that were returned

    def add(self, piece: str, last: bool = False) -> Tokens:
        """Adds a piece of the text. Returns the new tokens that no later piece can change. `last`: no piece follows, so
        all remaining tokens are returned."""
        self._text += piece
        found = []
        while self._window is not None or len(self._text) >= self._end or last:
            if self._window is None:
                self._end = min(self._end, len(self._text))
                [self._window] = self._encode([self._text[: self._end]])
            ends = [*range(self._end + WINDOW, len(self._text) + 1, WINDOW)][:_AT_ONCE]
            if last and not ends and self._end < len(self._text):
                ends = [len(self._text)]
            if not ends:
                break
            found += self._join(ends)
        if last:
            found.append(self._placed(0, len(self._window)))
        return np.concatenate(found) if found else np.empty((0, 1), np.int32)

    def _join(self, ends: list[int]) -> list[Tokens]:
        """Tokenizes the windows (parts of the text) that end at characters `ends` of self._text, and joins each to the
        one before. Stops if two windows cannot be joined. Returns the tokens before the last joint, which no later text
        can change."""
        spans = []
        for cut, end in zip([self._end, *ends[:-1]], ends, strict=True):
            if not (begins := self._begins(cut, most=1)):
                break
            spans.append((*begins, cut, end))
        encoded = iter(self._encode([text for span in spans for text in self._around(*span)]))
        found, begun = [], 0
        for begin, cut, end in spans:
            window, joint = self._joint(*(next(encoded) for _ in range(3)))
            if joint is None:
                begin, window, joint = self._begun_earlier(cut, end)
            if joint is None:
                break
            found.append(self._placed(begun, joint[0]))
            self._window, self._end, self._given, begun = window, end, joint[1], begin
        # The next attempt gives twice the length to the window that could not be joined to its successor.
        if len(found) < len(ends):
            self._window, self._end = None, 2 * self._end - begun
        self._text, self._before, self._end = self._text[begun:], self._before + begun, self._end - begun
        return found

    def _begins(self, cut: int, most: int) -> list[int]:
        """Returns up to `most` indices in self._text at which the next window (part to tokenize) may begin, latest
        first. `cut`: index at which the previous window ends."""
        latest = cut - OVERLAP
        if self._word_starts is None:
            return [*range(latest, max(latest - most, 0), -1)]
        places = range(latest, max(latest - WINDOW // 2, 0), -1)
        return [*itertools.islice((place for place in places if self._text[place] in self._word_starts), most)]

    def _around(self, begin: int, cut: int, end: int) -> list[str]:
        return [self._text[begin:cut], self._text[begin : cut - 1], self._text[begin:end]]

    def _begun_earlier(self, cut: int, end: int) -> tuple[int, Tokens | None, tuple[int, int] | None]:
        """Begins the next window (part of the text) earlier, until its tokens agree in the overlap with those of the
        previous window. `cut`, `end`: indices in self._text at which the previous and the next window end. Returns
        (begin, tokens of the next window, indices at which the two are joined), or (0, None, None) if no begin
        helps."""
        begins = self._begins(cut, most=_SHIFTS)[1:]
        overlaps = self._encode([self._text[begin:cut] for begin in begins])
        agreeing = [
            begin
            for begin, overlap in zip(begins, overlaps, strict=True)
            if common_start(overlap[::-1, 0], self._window[::-1, 0]) > len(overlap) / 2
        ]
        for begin in agreeing[:_SHIFTS_TRIED]:
            window, joint = self._joint(*self._encode(self._around(begin, cut, end)))
            if joint:
                return begin, window, joint
        return 0, None, None

    def _joint(self, overlap: Tokens, shorter: Tokens, window: Tokens) -> tuple[Tokens, tuple[int, int] | None]:
        """Finds where to join the tokens of two overlapping parts of the text: self._window, then `window`. Returns
        `window` unchanged, and (end, start): take self._window[:end], then window[start:]. Returns None for this pair
        if too few tokens agree. `overlap`: tokens of the text that both parts share. `shorter`: tokens of that text
        without its last character, to find tokens that agree by accident."""
        first = len(overlap) - common_start(overlap[::-1, 0], self._window[::-1, 0])
        # `shorter` must agree, too: digits counted from a number's right end may agree by accident.
        after = min(common_start(overlap[:, 0], other[:, 0]) for other in (window, shorter))
        middle = (first + after) // 2
        place = len(self._window) - len(overlap) + middle
        agree = after - first >= max(len(overlap) / 2, 2) and place >= self._given
        return window, (place, middle) if agree else None

    def _placed(self, begun: int, stop: int) -> Tokens:
        """Returns tokens of the latest window (part of the text), self._window, up to index `stop`. Leaves out those
        returned earlier. Their places, if known, count from the start of the whole text. `begun`: index in self._text
        at which the window begins."""
        tokens = self._window[self._given : stop].copy()
        tokens[:, 1:] += self._before + begun
        return tokens


def common_start(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the length of the longest common prefix of two arrays of ids."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
