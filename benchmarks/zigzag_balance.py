"""How evenly causal attention falls on cp ranks: query-key pairs of the busiest rank over the mean, counted exactly.

    python benchmarks/zigzag_balance.py

Four ways to hand out packed documents: one contiguous part per rank, the zig-zag of the whole sequence, the zig-zag's
2 * cp chunks dealt by their cost (longest first, two per rank), and a zig-zag inside every document, which is even
but pads each document to a multiple of 2 * cp. The first two are counted over ``visible_pieces``, what the
package computes. Lengths are drawn from log-normal distributions, and come from the default corpus.

Shapes: S tokens of a sequence.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean

from lightning_moe_strategy.context_parallel.layout import Segment, SequenceLayout, contiguous, zigzag
from lightning_moe_strategy.context_parallel.visible import Piece, visible_pieces
from lightning_moe_strategy.models.corpus import Corpus
from lightning_moe_strategy.models.token_store import open_store

SMALLEST_DOCUMENT = 16
DRAWN = {
    "median 1k": (131_072, 1024, 1.0),
    "median 8k": (131_072, 8192, 1.2),
    "median 8k, heavy tail": (1_048_576, 8192, 1.5),
}
"""Tokens of a sequence; median and sigma of the log-normal distribution of document lengths."""


def num_pairs(layout: SequenceLayout, document_starts: Sequence[int], window: int | None = None) -> list[int]:
    """Query-key pairs that each rank computes for one head of one sequence."""
    return [sum(_pairs_of(segment, document_starts, window) for segment in owned) for owned in layout.segments]


def skew(work: Sequence[float]) -> float:
    """Of the busiest rank: max over mean."""
    return max(work) / mean(work)


def dealt_by_cost(num_tokens: int, degree: int, document_starts: Sequence[int]) -> list[int]:
    """Pairs per rank when the zig-zag's chunks go, longest first, to the rank with least work and less than two."""
    chunks = contiguous(num_tokens, 2 * degree)
    work, held = [0] * degree, [0] * degree
    for pairs in sorted(num_pairs(chunks, document_starts), reverse=True):
        rank = min((rank for rank in range(degree) if held[rank] < 2), key=lambda rank: work[rank])
        work[rank] += pairs
        held[rank] += 1
    return work


def padding_share(num_tokens: int, degree: int, document_starts: Sequence[int]) -> float:
    """Tokens that a zig-zag inside of every document adds, over those there are."""
    ends = [*document_starts[1:], num_tokens]
    return sum(-(end - start) % (2 * degree) for start, end in zip(document_starts, ends, strict=True)) / num_tokens


def starts_of(lengths: Iterator[int], num_tokens: int) -> list[int]:
    """Starts of documents of these lengths, one after another, the last cut off at ``num_tokens``."""
    starts = [0]
    while (start := starts[-1] + next(lengths)) < num_tokens:
        starts.append(start)
    return starts


def drawn_lengths(median: int, sigma: float, largest: int, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    while True:
        yield min(max(int(generator.lognormvariate(math.log(median), sigma)), SMALLEST_DOCUMENT), largest)


def corpus_lengths() -> list[int]:
    """Tokens of every document of the default corpus, in a mixed order."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder), Corpus(), vocab_size=1024, validation_fraction=0.0)
        starts = store.document_starts("train").tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    random.Random(0).shuffle(lengths)
    return lengths


def print_row(name: str, num_tokens: int, degree: int, sequences: Sequence[Sequence[int]]) -> None:
    """Means over the sequences, each given by its documents' starts; the worst of the zig-zag in brackets."""
    zigzags = [skew(num_pairs(zigzag(num_tokens, degree), starts)) for starts in sequences]
    parts = mean(skew(num_pairs(contiguous(num_tokens, degree), starts)) for starts in sequences)
    dealt = mean(skew(dealt_by_cost(num_tokens, degree, starts)) for starts in sequences)
    padding = mean(padding_share(num_tokens, degree, starts) for starts in sequences)
    whole = num_tokens * (num_tokens + 1) / 2
    share = mean(sum(num_pairs(contiguous(num_tokens, 1), starts)) / whole for starts in sequences)
    print(
        f"{name:<24}{num_tokens:>9}{degree:>5}{parts:>12.3f}{mean(zigzags):>10.3f} ({max(zigzags):.3f})"
        f"{dealt:>10.3f}{f'even, pads {100 * padding:.1f} %':>22}{100 * share:>10.1f} %"
    )


def _pairs_of(segment: Segment, document_starts: Sequence[int], window: int | None) -> int:
    return sum(_pairs(piece) for piece in visible_pieces(segment, document_starts, window))


def _pairs(piece: Piece) -> int:
    num_queries, num_keys = piece.queries[1] - piece.queries[0], piece.keys[1] - piece.keys[0]
    return num_queries * num_keys if piece.shape == "all" else num_queries * (num_queries + 1) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=20, help="drawn for each row (%(default)s)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 64])
    arguments = parser.parse_args()
    print("Attention pairs of the busiest rank over the mean, averaged over sequences (the worst one)")
    print(
        f"{'documents':<24}{'tokens':>9}{'cp':>5}{'contiguous':>12}{'zig-zag':>18}{'dealt':>10}"
        f"{'per document':>22}{'of causal':>12}"
    )
    lengths = corpus_lengths()
    for degree in arguments.degrees:
        for name, (num_tokens, median, sigma) in DRAWN.items():
            draws = (drawn_lengths(median, sigma, num_tokens, seed) for seed in range(arguments.sequences))
            print_row(name, num_tokens, degree, [starts_of(draw, num_tokens) for draw in draws])
        corpus = cycle(lengths)
        rows = max(1, sum(lengths) // 131_072)
        print_row("default corpus", 131_072, degree, [starts_of(corpus, 131_072) for _ in range(rows)])
        print_row("one document", 131_072, degree, [[0]])


if __name__ == "__main__":
    main()
