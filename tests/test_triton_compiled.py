"""Compiled for GPUs that are not there, every kernel stays in registers, fits the card, and uses its instructions.

A launcher is called with tensors on the meta device at the sizes of real models; what it would launch is compiled as it
would be launched. Shapes: T tokens, K experts per token, E experts, D hidden, I intermediate, R rows.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  # after the skip
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from lightning_moe_strategy.kernels import (  # noqa: E402
    triton_outer_products,
    triton_peer_copy,
    triton_router,
    triton_routing,
    triton_rows,
    triton_swiglu,
)
from lightning_moe_strategy.kernels.peer_copy import Peers  # noqa: E402

MAX_SHARED_BYTES = 227 * 1024
"""Of one block of threads, on compute capability 9.0, 10.0 and 10.3 alike."""
MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

CAPABILITIES = [90, 100, pytest.param(103, marks=pytest.mark.slow)]
"""sm_90: H100 and H200. sm_100: B200, GB200. sm_103: B300, GB300, whose code differs from sm_100's in little."""


@dataclass(frozen=True)
class Launch:
    """One kernel as a launcher launched it."""

    kernel: Any
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    grid: Any = None

    @property
    def name(self) -> str:
        blocks = [str(value) for name, value in self.arguments.items() if name.startswith("BLOCK")]
        return "-".join([self.kernel.__name__, *blocks, str(self.num_warps), str(self.num_stages)])


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sort() -> None:
    triton_routing.sort_by_expert(meta(32768, 8, dtype=torch.int64), 256)


def spread(dtype: torch.dtype = torch.bfloat16, hidden: int = 7168) -> None:
    triton_rows.spread_rows(
        meta(16384, hidden, dtype=dtype), meta(131072, dtype=torch.int32), meta(16384, 8, dtype=torch.int32)
    )


def add(dtype: torch.dtype = torch.bfloat16, hidden: int = 7168) -> None:
    triton_rows.add_rows(meta(131072, hidden, dtype=dtype), meta(16384, 8, dtype=torch.int32))


def swiglu(intermediate: int = 2048) -> None:
    triton_swiglu.swiglu_prob(meta(65536, 2 * intermediate), meta(65536, dtype=torch.float32))


def swiglu_backward(intermediate: int = 2048) -> None:
    h_RH, probs_R = meta(65536, 2 * intermediate), meta(65536, dtype=torch.float32)
    triton_swiglu.swiglu_prob_backward(meta(65536, intermediate), h_RH, probs_R)


def swiglu_of_filled_rows() -> None:
    offsets_E, probs_R = meta(32, dtype=torch.int32), meta(65536, dtype=torch.float32)
    triton_swiglu.swiglu_prob(meta(65536, 4096), probs_R, num_rows=offsets_E[-1:])
    triton_swiglu.swiglu_prob_backward(meta(65536, 2048), meta(65536, 4096), probs_R, num_rows=offsets_E[-1:])


def put_copies(dtype: torch.dtype = torch.bfloat16, width: int = 7168) -> None:
    ranks_TJ, places_TJ = meta(16384, 8, dtype=torch.int32), meta(16384, 8, dtype=torch.int32)
    triton_peer_copy.put_copies(meta(16384, width, dtype=dtype), peers(), 2**32, ranks_TJ, places_TJ)


def put_sums(dtype: torch.dtype = torch.bfloat16, width: int = 7168) -> None:
    rows_of_slots_CK, ranks_C = meta(131072, 8, dtype=torch.int32), meta(131072, dtype=torch.int32)
    triton_peer_copy.put_sums(meta(65536, width, dtype=dtype), peers(), 2**32, rows_of_slots_CK, ranks_C, ranks_C)


def signal() -> None:
    triton_peer_copy.signal(meta(64, dtype=torch.int32), peers(), 16, 3, 7)


def wait() -> None:
    triton_peer_copy.wait(meta(64, dtype=torch.int32), 7, seconds=1.0)


def peers() -> Peers:
    return Peers((), meta(64, dtype=torch.int64))


def router(num_experts: int, top_k: int, scoring: Any, **groups: int) -> None:
    logits_TE = meta(16384, num_experts, dtype=torch.float32).requires_grad_()
    bias_E = meta(num_experts, dtype=torch.float32) if scoring == "sigmoid" else None
    weights_TK, _ = triton_router.choose_experts(
        logits_TE, bias_E, top_k=top_k, scoring=scoring, normalize_top_k=True, routed_scaling=2.5, **groups
    )
    torch.autograd.grad(weights_TK, logits_TE, torch.empty_like(weights_TK))


def outer_products() -> None:
    offsets_E = meta(32, dtype=torch.int32)
    accumulated_EMN = meta(32, 4096, 7168, dtype=torch.float32)
    triton_outer_products.add_outer_products(meta(65536, 4096), meta(65536, 7168), offsets_E, accumulated_EMN)


STREAMING = {
    "spread, DeepSeek-V3": spread,
    "spread, Qwen3-30B in FP32": lambda: spread(torch.float32, 2048),
    "add, DeepSeek-V3": add,
    "add, Qwen3-30B in FP32": lambda: add(torch.float32, 2048),
    "swiglu, DeepSeek-V3": swiglu,
    "swiglu, Qwen3-30B": lambda: swiglu(768),
    "swiglu backward, DeepSeek-V3": swiglu_backward,
    "swiglu backward, Qwen3-30B": lambda: swiglu_backward(768),
    "swiglu of filled rows, both ways": swiglu_of_filled_rows,
    "put copies, DeepSeek-V3": put_copies,
    "put copies, Qwen3-30B in FP32": lambda: put_copies(torch.float32, 2048),
    "put sums, DeepSeek-V3": put_sums,
    "put sums, Qwen3-30B in FP32": lambda: put_sums(torch.float32, 2048),
}
"""Bound by memory, and no kernel else moves as many bytes."""
OTHERS = {
    "sort": sort,
    "spread, probabilities": lambda: spread(torch.float32, 1),
    "put copies, ids of experts": lambda: put_copies(torch.int32, 8),
    "put copies, rows of odd bytes": lambda: put_copies(torch.bfloat16, 7167),
    "put sums, rows of odd bytes": lambda: put_sums(torch.bfloat16, 7167),
    "signal": signal,
    "wait": wait,
    "router, Qwen3": lambda: router(128, 8, "softmax"),
    "router, DeepSeek-V3": lambda: router(256, 8, "sigmoid", num_groups=8, top_k_groups=4),
    "router, DeepSeek-V2": lambda: router(160, 6, "softmax", num_groups=8, top_k_groups=3),
    "router, Kimi K2": lambda: router(384, 8, "sigmoid"),
    "outer products": outer_products,
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", [*STREAMING, *OTHERS])
def test_a_kernel_spills_nothing_and_fits_the_card(case: str, capability: int):
    for launch in launches((STREAMING | OTHERS)[case]):
        compiled = compile_for(launch, capability)
        assert compiled.metadata.shared <= MAX_SHARED_BYTES, launch.name
        assert registers_and_spills(compiled)[1] == 0, launch.name


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", STREAMING)
def test_a_kernel_bound_by_memory_moves_16_bytes_at_a_time(case: str, capability: int):
    for launch in launches(STREAMING[case]):
        ptx = compile_for(launch, capability).asm["ptx"]
        for operation in ("ld", "st"):
            # Numbers of a row each (a row index, a probability) take narrow accesses; whole tiles never do.
            wide = re.findall(rf"{operation}\.global[.\w:]*\.v4\.b32", ptx)
            narrow_halves = re.findall(rf"{operation}\.global[.\w:]*\.[bu]16", ptx)
            assert wide, (launch.name, operation)
            assert not narrow_halves, (launch.name, operation)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flags_are_raised_and_read_for_other_gpus(capability: int):
    """Peers see what a rank has put before they see its flag, over NVLink too: no weaker order or scope will do."""
    for launcher, order in ((signal, r"release\.exch"), (wait, r"acquire\.add")):
        (launch,) = launches(launcher)
        ptx = compile_for(launch, capability).asm["ptx"]
        atomics = re.findall(r"\b(?:atom|red)\.\S+", ptx)
        assert atomics and all(re.search(rf"\.sys\.{order}\.", each) for each in atomics), atomics
        assert re.search(r"bar\.sync|barrier\.sync|bar\.warp\.sync", ptx), launch.name


@pytest.mark.parametrize("case", ["put copies, DeepSeek-V3", "put sums, DeepSeek-V3"])
def test_a_put_takes_few_sms_however_much_it_moves(case: str):
    """24 programs of 1,024 threads, for which an SM has 64 registers each."""
    (launch,) = launches(STREAMING[case])
    assert (launch.grid, launch.num_warps) == ((24,), 32)
    assert registers_and_spills(compile_for(launch, 90))[0] <= 64


@pytest.mark.parametrize("case", STREAMING)
def test_places_in_memory_are_64_bits_wide(case: str):
    """65,536 rows of 32,768 numbers are the first that a 32-bit offset does not reach."""
    for launch in launches(STREAMING[case]):
        code = compile_for(launch, 90).asm["ttir"]
        tiles = re.findall(r"(%\w+) = tt\.splat %\w+ : !tt\.ptr<\w+> -> tensor<\d+x\d+x", code)
        widths = {width for tile in tiles for width in re.findall(rf"tt\.addptr {tile}, .*xi(\d+)>", code)}
        assert tiles and widths == {"64"}, launch.name


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_outer_products_run_on_tensor_cores_in_every_configuration(capability: int):
    configurations = launches(outer_products)
    assert len(configurations) == len(triton_outer_products.CONFIGS) > 1
    for launch in configurations:
        assert MATRIX_INSTRUCTION[capability] in compile_for(launch, capability).asm["ptx"], launch.name


def launches(launcher: Callable[[], None]) -> list[Launch]:
    """What a launcher launches; of an autotuned kernel, every configuration."""
    recorded: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, num_stages: int = 3, **kwargs: Any):
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        recorded.append(Launch(kernel, arguments, num_warps, num_stages, grid))

    def run_autotuned(tuner: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any):
        for config in tuner.configs:
            run(tuner.fn, *args, grid=grid, warmup=warmup, **kwargs, **config.all_kwargs())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(Autotuner, "run", run_autotuned)
        launcher()
    assert recorded
    return recorded


_compiled: dict[tuple[str, str, int], Any] = {}


def compile_for(launch: Launch, capability: int) -> Any:
    signature, constants, attributes = specialized(launch)
    key = (launch.name, repr((signature, constants)), capability)
    if key not in _compiled:
        _compiled[key] = triton.compile(
            ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    return _compiled[key]


def specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Signature, constants and attributes as Triton's launch derives them from arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_specialized = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_specialized and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]  # torch allocates in steps of 512 bytes
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else parameter.annotation_type or "i32"
            if is_specialized and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def registers_and_spills(compiled: Any) -> tuple[int, int]:
    """Of one thread; spills in bytes, stores and loads together."""
    ptx = compiled.asm["ptx"]
    (target,) = re.findall(r"\.target (\w+)", ptx)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    command = [str(assembler), "-v", f"--gpu-name={target}", "-", "-o", "/dev/null"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return (
        max(int(number) for number in re.findall(r"Used (\d+) registers", report)),
        sum(int(number) for number in re.findall(r"(\d+) bytes spill", report)),
    )
