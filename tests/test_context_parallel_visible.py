"""Pieces without a mask that together are exactly what a mask would let through."""

import random

from lightning_moe_strategy.context_parallel.layout import Segment
from lightning_moe_strategy.context_parallel.visible import pieces_of_batch, visible_pieces


def pairs(piece):
    """Every (query, key) of a piece."""
    queries, keys = range(*piece.queries), range(*piece.keys)
    if piece.shape != "all":
        assert len(queries) == len(keys)
    for i, query in enumerate(queries):
        seen = {"all": keys, "up to own": keys[: i + 1], "from own": keys[i:]}[piece.shape]
        yield from ((query, key) for key in seen)


def test_pieces_hold_every_visible_pair_once():
    random.seed(0)
    for _ in range(2000):
        num_tokens = random.randint(1, 30)
        documents = sorted({0, *random.choices(range(num_tokens), k=random.randint(0, 4))})
        start = random.randint(0, num_tokens - 1)
        segment = Segment(start, random.randint(1, num_tokens - start))
        window = random.choice([None, 1, 2, 3, 5, 8, 40])
        found = [pair for piece in visible_pieces(segment, documents, window) for pair in pairs(piece)]
        expected = [
            (query, key)
            for query in range(segment.start, segment.end)
            for key in range(max(start for start in documents if start <= query), query + 1)
            if window is None or key > query - window
        ]
        assert sorted(found) == expected, (segment, documents, window)


def test_own_keys_come_first_and_cover_every_query():
    for documents in (((0, 3, 11),), ((0,), (0, 5))):
        pieces = pieces_of_batch(Segment(4, 10), documents, 3)
        own = [piece for piece in pieces if piece.queries == piece.keys]
        assert pieces[: len(own)] == own
        for sequence in range(len(documents)):
            rows = [t for p in own if p.sequence in (None, sequence) for t in range(*p.queries)]
            assert sorted(rows) == list(range(4, 14))


def test_a_window_costs_the_same_number_of_pairs_wherever_a_segment_lies():
    counts = {
        sum(1 for piece in visible_pieces(Segment(start, 64), [0], 16) for _ in pairs(piece)) for start in (16, 64, 512)
    }
    assert counts == {64 * 16}
