"""Who owns which token: balance, order, dummies, and the refusals."""

import pytest
import torch

from lightning_moe_strategy.context_parallel.layout import (
    Segment,
    SequenceLayout,
    contiguous,
    per_document,
    take_segments,
    zigzag,
)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 64])
def test_zigzag_gives_every_rank_the_same_number_of_causal_pairs(degree):
    layout = zigzag(6 * degree, degree)
    pairs = [int((layout.token_ids(rank) + 1).sum()) for rank in range(degree)]
    num_tokens = layout.num_tokens
    assert set(pairs) == {num_tokens * (num_tokens + 1) // 2 // degree}


def test_zigzag_rank_holds_its_chunk_and_the_mirrored_one():
    assert zigzag(8, 2).token_ids(0).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 2).token_ids(1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("make", [zigzag, contiguous])
@pytest.mark.parametrize("degree", [1, 2, 5])
def test_rank_major_and_natural_order_are_inverse(make, degree):
    layout = make(10 * degree, degree)
    natural = torch.arange(layout.num_tokens)
    rank_major = take_segments(natural, 0, layout.rank_major_in_natural)
    assert rank_major.tolist() == layout.rank_major_token_ids().tolist()
    assert take_segments(rank_major, 0, layout.natural_in_rank_major).tolist() == natural.tolist()


def test_contiguous_gathers_without_a_copy():
    x = torch.randn(8, 3)
    assert take_segments(x, 0, contiguous(8, 4).natural_in_rank_major) is x


def test_a_layout_of_documents_is_just_other_segments():
    """Two documents, 0-7 and 8-11, each zig-zag over two ranks."""
    layout = SequenceLayout(
        segments=(
            (Segment(0, 2), Segment(6, 2), Segment(8, 1), Segment(11, 1)),
            (Segment(2, 4), Segment(9, 2)),
        )
    )
    gathered = layout.rank_major_token_ids()
    assert take_segments(gathered, 0, layout.natural_in_rank_major).tolist() == list(range(12))


def test_tail_tokens_stand_at_the_end_of_the_whole_sequence():
    layout = zigzag(8, 2).with_tail_token()
    assert layout.token_ids(0).tolist() == [0, 1, 6, 7, 8]
    assert layout.token_ids(1).tolist() == [2, 3, 4, 5, 9]
    assert layout.for_local_length(5) is layout
    assert layout.for_local_length(4) == zigzag(8, 2)
    assert [layout.num_owned_before(7, rank) for rank in (0, 1)] == [3, 4]


def test_a_local_length_that_is_neither_names_both():
    with pytest.raises(ValueError, match=r"6 tokens .* holds 4 or 5\."):
        zigzag(8, 2).with_tail_token().for_local_length(6)
    with pytest.raises(ValueError, match=r"8 tokens .* holds 4\."):
        zigzag(8, 2).for_local_length(8)


def test_errors_name_the_number_that_does_not_divide():
    with pytest.raises(ValueError, match=r"num_tokens\(10\).*2 \* cp\(4\)"):
        zigzag(10, 2)
    with pytest.raises(ValueError, match=r"num_tokens\(0\).*cp\(2\)"):
        contiguous(0, 2)


def test_segments_must_cover_every_token_once_and_evenly():
    with pytest.raises(ValueError, match="without gap or overlap"):
        SequenceLayout(segments=((Segment(0, 2),), (Segment(1, 2),)))
    with pytest.raises(ValueError, match=r"\[2, 1\] tokens"):
        SequenceLayout(segments=((Segment(0, 2),), (Segment(2, 1),)))


def test_every_document_is_shared_out_evenly():
    layout = per_document([8, 4, 16], 2)
    for start, end in ((0, 8), (8, 12), (12, 28)):
        pairs = [
            sum(
                id - start + 1
                for segment in owned
                for id in range(segment.start, segment.end)
                if start <= segment.start < end
            )
            for owned in layout.segments
        ]
        assert pairs[0] == pairs[1]
