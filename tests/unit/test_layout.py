"""The layout: every element in one span, spans and fields where kernels and direct I/O want them; storage order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierstore.layout import (
    CUT_ELEMENTS,
    PACK_ELEMENTS,
    RECORD_ALIGNMENT,
    Chunk,
    ChunkClass,
    Field,
    Layout,
    ParameterSpec,
    as_real,
    empty_like_stored,
    in_storage_order_of,
    is_dense,
    make_layout,
    round_up,
    slices_of,
    storage_order,
)

MOMENTS = (Field("exp_avg", torch.float32), Field("exp_avg_sq", torch.float32))
FLOAT32 = ChunkClass(torch.float32, "cpu", MOMENTS, "cpu")
BFLOAT16 = ChunkClass(torch.bfloat16, "cpu", (Field("master", torch.float32), *MOMENTS), "cpu")
ODD = ChunkClass(torch.float16, "cpu", (Field("low", torch.bfloat16), Field("flags", torch.int8), *MOMENTS), "gpu")
FROZEN = ChunkClass(torch.float32, "cpu", (), "cpu")
SPLIT = ChunkClass(
    torch.bfloat16, "cpu", (*MOMENTS, Field("low", torch.int16), Field("flag", torch.uint8, bits=1)), "cpu"
)
CLASSES = (FLOAT32, BFLOAT16, ODD, SPLIT, FROZEN)
KIB = 1024


def specs(sizes: Sequence[int], cls: ChunkClass = FLOAT32) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{number}", number % 3, size, cls) for number, size in enumerate(sizes)]


def check(layout: Layout, parameters: Sequence[ParameterSpec], chunk_bytes: int) -> None:
    """Everything a layout promises."""
    assert len(layout.spans_of) == len(parameters)
    for number, (spec, spans) in enumerate(zip(parameters, layout.spans_of, strict=True)):
        position = 0
        for chunk, span in spans:
            assert (span.parameter, span.group, span.start) == (number, spec.group, position)
            assert span.start % CUT_ELEMENTS == 0
            assert span.length > 0
            assert span in chunk.spans
            assert chunk.cls == spec.cls
            position += span.length
        assert position == (spec.elements if spec.cls.fields else 0)
    for chunk in layout.chunks:
        check_chunk(chunk, chunk_bytes)
    assert sum(len(chunk.spans) for chunk in layout.chunks) == sum(map(len, layout.spans_of))


def check_chunk(chunk: Chunk, chunk_bytes: int) -> None:
    assert chunk.spans
    for one, other in pairwise(chunk.spans):
        assert one.offset + one.length <= other.offset
    assert all(span.offset % PACK_ELEMENTS == 0 for span in chunk.spans)
    assert chunk.elements % PACK_ELEMENTS == 0
    assert chunk.elements - PACK_ELEMENTS < chunk.spans[-1].offset + chunk.spans[-1].length <= chunk.elements
    assert chunk.record_bytes % RECORD_ALIGNMENT == 0
    assert chunk.cls.bytes_of(chunk.elements) <= chunk.record_bytes <= chunk_bytes
    ends = 0
    for field in chunk.cls.fields:
        begin = chunk.field_offsets[field.name]
        assert begin == ends
        assert begin % (PACK_ELEMENTS * min(other.element_bits for other in chunk.cls.fields) // 8) == 0
        assert begin % field.dtype.itemsize == 0
        ends = begin + chunk.elements * field.element_bits // 8
    assert ends <= chunk.record_bytes


sizes = st.one_of(
    st.integers(0, 40), st.integers(0, 5000), st.sampled_from([1023, 1024, 1025, 2047, 2048, 2049, 513_000, 1_048_577])
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(st.tuples(sizes, st.sampled_from(CLASSES)), max_size=30), st.sampled_from([16, 20, 64, 256, 1024]))
def test_every_element_is_in_exactly_one_span_and_every_record_in_its_extent(
    drawn: list[tuple[int, ChunkClass]], chunk_kib: int
) -> None:
    parameters = [ParameterSpec(f"p{number}", 0, size, cls) for number, (size, cls) in enumerate(drawn)]
    check(make_layout(parameters, chunk_kib * KIB), parameters, chunk_kib * KIB)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.sampled_from([FLOAT32, BFLOAT16, ODD, SPLIT]))
def test_field_views_are_aligned_and_disjoint(lengths: list[int], cls: ChunkClass) -> None:
    """Numbers written through one field's view are found there again after all other fields were written."""
    for chunk in make_layout(specs(lengths, cls), 32 * KIB).chunks:
        record = torch.zeros(chunk.record_bytes, dtype=torch.uint8)
        for number, field in enumerate(cls.fields):
            chunk.field(record, field.name).fill_(number + 1)
        for number, field in enumerate(cls.fields):
            view = chunk.field(record, field.name)
            assert view.dtype == field.dtype
            assert view.nbytes == chunk.elements * field.element_bits // 8
            assert torch.all(view == number + 1)
        assert torch.all(record[cls.bytes_of(chunk.elements) :] == 0)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.sampled_from([16, 24]))
def test_a_spans_part_of_a_field_of_bits_is_whole_bytes_of_its_own(lengths: list[int], chunk_kib: int) -> None:
    for chunk in make_layout(specs(lengths, SPLIT), chunk_kib * KIB).chunks:
        record = torch.zeros(chunk.record_bytes, dtype=torch.uint8)
        for number, (span, part) in enumerate(zip(chunk.spans, chunk.parts(record, "flag"), strict=True)):
            assert 8 * part.numel() >= span.length > 8 * (part.numel() - 1)
            assert part.data_ptr() == chunk.part(record, "flag", span).data_ptr()
            assert torch.all(part == 0)
            part.fill_(number + 1)
        for number, span in enumerate(chunk.spans):
            assert torch.all(chunk.part(record, "flag", span) == number + 1)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.sampled_from([FLOAT32, BFLOAT16, ODD, SPLIT]),
    st.sampled_from([1, 12 * KIB, 40 * KIB, 64 * KIB]),
)
def test_slices_are_chunks_of_their_own_that_are_all_of_a_chunk(
    lengths: list[int], cls: ChunkClass, most_bytes: int
) -> None:
    """Each field of a record is what its slices' fields are one after another, and each span what lies in them."""
    for chunk in make_layout(specs(lengths, cls), 64 * KIB).chunks:
        record = torch.randint(0, 256, (chunk.record_bytes,), dtype=torch.uint8)
        found: dict[tuple[str, int], list[Tensor]] = {}
        expected = 0
        for begin, one in slices_of(chunk, most_bytes):
            assert begin == expected and one.cls.bytes_of(one.elements) <= max(most_bytes, cls.bytes_of(CUT_ELEMENTS))
            expected += one.elements
            own = torch.zeros(one.record_bytes, dtype=torch.uint8)
            for field in cls.fields:
                part = chunk.field(record, field.name)[field.items(begin) :][: field.items(one.elements)]
                one.field(own, field.name).copy_(part)
                for span in one.spans:
                    found.setdefault((field.name, span.parameter), []).append(one.part(own, field.name, span))
        assert expected == chunk.elements
        for field in cls.fields:
            for span in chunk.spans:
                whole = chunk.part(record, field.name, span)
                assert torch.equal(
                    torch.cat(found[field.name, span.parameter]).view(torch.uint8), whole.view(torch.uint8)
                )
        starts = {span.parameter: span.start for span in chunk.spans}
        for _, one in slices_of(chunk, most_bytes):
            for span in one.spans:
                assert span.start == starts[span.parameter]
                starts[span.parameter] += span.length


@pytest.mark.parametrize("cls", [FLOAT32, BFLOAT16, ODD])
@pytest.mark.parametrize("chunk_bytes", [24 * KIB, 64 * KIB, 8 << 20])
@pytest.mark.parametrize(
    "elements",
    [
        pytest.param([512 * 1000, 1000], id="case-1-layer-of-513000"),
        pytest.param([14_412_000], id="case-2-tail-after-the-last-request"),
        pytest.param([9_000_000], id="case-3-larger-than-a-tier"),
        pytest.param([1 + 7 * number % 500 for number in range(400)], id="case-4-hundreds-of-tiny"),
        pytest.param([1024], id="case-5-fp16"),
        pytest.param([1, 3, 22, 55, 64, 128, 1023, 1024, 1_048_576, 1_048_577], id="case-5-sizes"),
        pytest.param([2**31 + 12_345, 7], id="case-6-more-than-2-to-the-31"),
    ],
)
def test_small_inputs_from_public_reports(elements: list[int], chunk_bytes: int, cls: ChunkClass) -> None:
    """Cases 1 to 6: lengths no unit divides; others lost their tails, outgrew buffers or overflowed an index."""
    if sum(elements) > 2**31:
        chunk_bytes *= 256  # a million chunks are only slow
    parameters = specs(elements, cls)
    check(make_layout(parameters, chunk_bytes), parameters, chunk_bytes)


def test_hundreds_of_tiny_parameters_share_few_chunks() -> None:
    parameters = specs([1 + number % 100 for number in range(1000)])
    layout = make_layout(parameters, 64 * KIB)
    padded = sum(round_up(spec.elements, PACK_ELEMENTS) for spec in parameters)
    assert len(layout.chunks) == -(-padded * 8 // (64 * KIB))


def test_parameters_of_different_groups_share_a_chunk() -> None:
    (chunk,) = make_layout(specs([10, 20, 30]), 64 * KIB).chunks
    assert [span.group for span in chunk.spans] == [0, 1, 2]


def test_classes_do_not_share_chunks_and_come_in_order_of_appearance() -> None:
    parameters = [*specs([5]), *specs([5], BFLOAT16), *specs([5])]
    layout = make_layout(parameters, 64 * KIB, first_number=7)
    assert [(chunk.number, chunk.cls) for chunk in layout.chunks] == [(7, FLOAT32), (8, BFLOAT16)]
    assert [span.parameter for span in layout.chunks[0].spans] == [0, 2]


def test_a_parameter_smaller_than_a_cut_is_never_cut() -> None:
    layout = make_layout(specs([1500, 1000]), 16 * KIB)  # 2,048 elements a chunk
    assert [[(span.start, span.length) for _, span in spans] for spans in layout.spans_of] == [[(0, 1500)], [(0, 1000)]]


def test_empty_parameters_and_those_without_state_take_no_room() -> None:
    layout = make_layout([*specs([0, 0]), *specs([5000], FROZEN)], 16 * KIB)
    assert layout.chunks == ()
    assert layout.spans_of == ((), (), ())


def test_no_parameters_make_an_empty_layout() -> None:
    assert make_layout([], 16 * KIB) == Layout((), ())


def test_a_chunk_too_small_for_one_cut_names_the_size_that_is_not() -> None:
    with pytest.raises(ValueError, match="chunk_size to at least 12288"):
        make_layout(specs([1], BFLOAT16), 12_287)
    assert make_layout(specs([1], BFLOAT16), 12_288).chunks


def test_a_chunk_is_no_longer_than_what_is_in_it() -> None:
    (chunk,) = make_layout(specs([17]), 1 << 20).chunks
    assert (chunk.elements, chunk.record_bytes) == (32, 4096)


# -- storage order ----------------------------------------------------------------------------------------------


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


DENSE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: numbered((3, 4)),
    "transposed": lambda: numbered((3, 4)).t(),
    "permuted": lambda: numbered((2, 3, 4)).permute(2, 0, 1),
    "channels-last": lambda: numbered((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "channels-last-3d": lambda: numbered((2, 3, 2, 4, 5)).to(memory_format=torch.channels_last_3d),
    "0-dim": lambda: numbered(()),
    "1-element": lambda: numbered((1, 1, 1)),
    "empty": lambda: numbered((0,)),
    "empty-inside": lambda: numbered((3, 0, 2)).transpose(0, 2),
    "empty-strided": lambda: torch.empty(4, 0)[::2],
    "row-of-a-matrix": lambda: numbered((3, 4))[1],
    "odd-stride-of-a-size-1-dimension": lambda: numbered((12,)).as_strided((3, 1, 4), (4, 999, 1)),
    "odd-stride-of-one-element": lambda: numbered((5,)).as_strided((1, 1), (77, 3), 2),
    "expanded-by-one": lambda: numbered((3, 1)).expand(3, 1),
}
SPARSE: dict[str, Callable[[], Tensor]] = {
    "strided": lambda: numbered((8,))[::2],
    "columns": lambda: numbered((3, 4))[:, :2],
    "expanded": lambda: numbered((3, 1)).expand(3, 4),
    "expanded-scalar": lambda: numbered(()).expand(5),
    "overlapping": lambda: numbered((5,)).as_strided((3, 3), (1, 1)),
    "diagonal": lambda: numbered((4, 4)).diagonal(),
    "half-of-a-channels-last": lambda: numbered((2, 4, 3, 3)).to(memory_format=torch.channels_last)[:, :2],
    "real-parts": lambda: torch.view_as_real(torch.zeros(3, dtype=torch.complex64))[..., 0],
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())
def test_a_dense_tensor_is_viewed_as_its_storage_lies(make: Callable[[], Tensor]) -> None:
    tensor = make()
    flat = storage_order(tensor)
    assert is_dense(tensor)
    assert flat is not None
    assert flat.shape == (tensor.numel(),)
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
    assert flat.data_ptr() == tensor.data_ptr()
    flat.fill_(7)
    assert torch.all(tensor == 7)


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
def test_a_tensor_with_gaps_or_overlaps_has_no_storage_order(make: Callable[[], Tensor]) -> None:
    assert not is_dense(make())
    assert storage_order(make()) is None


@pytest.mark.parametrize("name", DENSE)
def test_values_follow_the_order_of_the_parameters_storage(name: str) -> None:
    """Whatever the strides of a gradient, element by element it meets the parameter's own."""
    parameter = DENSE[name]()
    identity = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
    wanted = torch.empty_strided(parameter.shape, parameter.stride()).copy_(identity)
    for values in (identity, wanted, wanted.double(), *(other for other in with_other_strides(identity))):
        flat = in_storage_order_of(parameter, values)
        assert flat.dtype == values.dtype
        assert flat.tolist() == [] if not flat.numel() else torch.equal(flat.float(), as_stored(wanted))


def as_stored(tensor: Tensor) -> Tensor:
    flat = storage_order(tensor)
    assert flat is not None
    return flat


def with_other_strides(tensor: Tensor) -> list[Tensor]:
    """The same values in a transposed, a gapped and (if they allow it) other layouts."""
    backwards = tuple(reversed(range(tensor.dim())))
    transposed = tensor.permute(backwards).contiguous().permute(backwards)
    gapped = torch.stack([tensor, tensor], dim=-1)[..., 0]
    channels_last = [tensor.to(memory_format=torch.channels_last)] if tensor.dim() == 4 else []
    return [transposed, gapped, *channels_last]


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
def test_values_for_a_parameter_that_is_not_dense_come_in_row_major_order(make: Callable[[], Tensor]) -> None:
    parameter = make()
    values = torch.randn(parameter.shape)
    for given_values in (values, *with_other_strides(values)):
        assert torch.equal(in_storage_order_of(parameter, given_values), values.flatten())


def test_an_expanded_gradient_is_spread_out() -> None:
    """torch's fused kernel would read an expanded gradient, as of a sum, beyond its one element."""
    gradient = torch.tensor(2.0).expand(3, 4)
    assert in_storage_order_of(numbered((3, 4)), gradient).tolist() == [2.0] * 12


def test_a_negative_view_shows_the_numbers_and_not_its_storage() -> None:
    """The imaginary part of a conjugate is stored with the other sign; as_strided and raw kernels miss that."""
    gradient = torch._neg_view(torch.ones(4))
    assert in_storage_order_of(numbered((4,)), gradient).tolist() == [-1.0] * 4
    assert not in_storage_order_of(numbered((4,)), gradient).is_neg()


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        (numbered((3, 4)), numbered((3, 4))),
        (numbered((3, 4)).t(), numbered((3, 4)).t()),
        (numbered((3, 1, 4)), numbered((12,)).as_strided((3, 1, 4), (4, 999, 1))),
        (numbered(()), numbered((5,))[3]),
        (numbered((0, 2)), numbered((0, 2))),
    ],
    ids=["same", "same-transposed", "size-1-dimension-apart", "0-dim", "empty"],
)
def test_values_in_the_parameters_layout_are_not_copied(parameter: Tensor, values: Tensor) -> None:
    flat = in_storage_order_of(parameter, values)
    assert flat.data_ptr() == values.data_ptr()
    assert flat.storage_offset() == values.storage_offset()


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())
def test_a_dense_parameter_is_its_own_values_without_a_copy(make: Callable[[], Tensor]) -> None:
    parameter = make()
    assert in_storage_order_of(parameter, parameter).data_ptr() == parameter.data_ptr()


def test_complex_numbers_are_pairs_of_real_ones() -> None:
    tensor = torch.view_as_complex(numbered((3, 2, 2))).t()
    flat = storage_order(as_real(tensor))
    assert flat is not None
    assert flat.tolist() == list(range(12))
    assert as_real(flat) is flat


@pytest.mark.parametrize("make", [*DENSE.values(), *SPARSE.values()], ids=[*DENSE.keys(), *SPARSE.keys()])
@pytest.mark.parametrize("has_storage", [False, True])
def test_state_has_the_shape_and_if_dense_the_strides_of_its_parameter(
    make: Callable[[], Tensor], has_storage: bool
) -> None:
    parameter = make()
    storage = torch.zeros(parameter.numel() + 3, dtype=torch.bfloat16)[3:] if has_storage else None
    state, flat = empty_like_stored(parameter, torch.bfloat16, storage)
    assert state.shape == parameter.shape
    assert state.dtype == flat.dtype == torch.bfloat16
    assert flat.shape == (parameter.numel(),)
    if is_dense(parameter):
        assert state.stride() == parameter.stride()
    values = torch.arange(parameter.numel()).reshape(parameter.shape).bfloat16()
    flat.copy_(in_storage_order_of(state, values))
    assert torch.equal(state, values)


dimensions = st.lists(st.integers(0, 4), max_size=4)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data(), dimensions)
def test_storage_order_is_a_permutation_for_any_dense_strides(data: st.DataObject, shape: list[int]) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    stored = torch.zeros([shape[dim] for dim in order])
    tensor = stored.permute([order.index(dim) for dim in range(len(shape))])
    assert list(tensor.shape) == shape
    assert is_dense(tensor)
    values = torch.randperm(tensor.numel()).reshape(shape)
    flat = storage_order(tensor)
    assert flat is not None
    flat.copy_(in_storage_order_of(tensor, values))
    assert torch.equal(tensor, values.float())


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=3))
def test_dense_means_each_place_of_one_gap_free_piece_once(sizes_and_strides: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in sizes_and_strides], [stride for _, stride in sizes_and_strides]
    tensor = torch.arange(64).as_strided(shape, strides)
    places = sorted(tensor.flatten().tolist())
    assert is_dense(tensor) == (places == list(range(tensor.numel())))


def test_round_up() -> None:
    assert [round_up(value, 16) for value in (0, 1, 16, 17)] == [0, 16, 16, 32]
