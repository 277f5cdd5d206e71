"""Tokenizes an example given as segments, (text, True if trained on), and finds the tokens that are trained on.

All segments are tokenized as one text. A token is trained on if any of its characters is in a trained segment.
"""

import itertools

import numpy as np

from lowmem.data.encoder import Encoder
from lowmem.data.long_text import common_start

Segments = list[tuple[str, bool]]  # (text, True if it is trained on)
Example = tuple[np.ndarray, np.ndarray]  # int32 [tokens], and bool [tokens]: True if trained on


class Seams:
    """Tokenizes examples. A call returns the token ids and the loss mask of each. `pairs`: the source and the target of
    an example are tokenized separately, for an encoder-decoder."""

    def __init__(self, encode: Encoder, pairs: bool):
        self._encode, self._pairs = encode, pairs
        self._straddled = 0

    @property
    def notes(self) -> list[str]:
        """Returns remarks for the log: in how many examples one token crosses from a prompt into an answer."""
        note = (
            f"in {self._straddled:,} of them one token is the end of a prompt and the beginning of an answer, so the "
            f"prompt by itself has other tokens; let answers begin with the space"
        )
        return [note] * (self._straddled > 0)

    def __call__(self, examples: list[Segments]) -> list[Example]:
        parts = [self._parts(segments) for segments in examples]
        texts = ["".join(text for text, _ in segments) for segments in itertools.chain(*parts)]
        if any(map(_is_mixed, itertools.chain(*parts))):
            tokens = iter(self._encode.with_places(texts))
        else:
            tokens = ((ids, None) for ids in self._encode(texts))
        marked = [[self._marked(segments, *next(tokens)) for segments in example] for example in parts]
        return [tuple(map(np.concatenate, zip(*example, strict=True))) for example in marked]

    def _parts(self, segments: Segments) -> list[Segments]:
        """Splits segments into lists that are tokenized separately. For an encoder-decoder, the target begins with the
        first trained segment."""
        if not self._pairs:
            return [segments]
        source = list(itertools.takewhile(lambda segment: not segment[1], segments))
        return [source, segments[len(source) :]]

    def _marked(self, segments: Segments, ids: np.ndarray, places: np.ndarray | None) -> Example:
        if not _is_mixed(segments):
            return ids, np.full(len(ids), any(trained for text, trained in segments if text))
        ends = [0, *itertools.accumulate(len(text) for text, _ in segments)]
        trained, straddled = np.zeros(len(ids), bool), False
        for (start, end), (_, is_trained) in zip(itertools.pairwise(ends), segments, strict=True):
            if not is_trained:
                continue
            if places is not None:
                begins, stops = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
                trained |= (begins < end) & (stops > start)
                straddled |= bool(((begins < start) & (stops > start)).any())
            elif start < end:
                # A tokenizer in Python reports no places. So the text before a boundary of segments (seam) is
                # tokenized, too: the first tokens that both results share are before the seam.
                text = "".join(text for text, _ in segments)
                first, last = (self._tokens_before(text, seam, ids) for seam in (start, end))
                trained[first[0] : sum(last)] = True
                straddled |= first[1]
        self._straddled += straddled
        return ids, trained

    def _tokens_before(self, text: str, seam: int, ids: np.ndarray) -> tuple[int, bool]:
        """Returns the number of tokens before character `seam` of `text`, and True if the next token crosses the seam.
        `ids`: the tokens of `text`."""
        [before] = self._encode([text[:seam]])
        count = common_start(before, ids)
        return count, count < len(before)


def _is_mixed(segments: Segments) -> bool:
    return len({trained for text, trained in segments if text}) > 1
