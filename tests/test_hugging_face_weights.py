"""Weights of Hugging Face folders: into sharded models, into checkpoints and out of them, bit for bit."""

import json
import shutil
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_moe_strategy import HFCausalLM, initialization, load_pretrained
from lightning_moe_strategy.checkpoint.errors import CheckpointError
from lightning_moe_strategy.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_moe_strategy.checkpoint.save import save_directory
from lightning_moe_strategy.checkpoint.stream import StreamedTensor, write_streamed
from lightning_moe_strategy.context_parallel.scope import ContextParallel
from lightning_moe_strategy.expert_parallel.experts import find_experts
from lightning_moe_strategy.hugging_face_weights.files import INDEX, WeightFiles, read_header
from lightning_moe_strategy.hugging_face_weights.into_checkpoint import into_checkpoint
from lightning_moe_strategy.hugging_face_weights.model import model_on_meta, plain_config, read_config
from lightning_moe_strategy.hugging_face_weights.out_of_checkpoint import out_of_checkpoint
from lightning_moe_strategy.hugging_face_weights.pieces import Mosaic
from lightning_moe_strategy.hugging_face_weights.pretrained import PretrainedWeights
from lightning_moe_strategy.hugging_face_weights.shards import NewTensor, ShardWriter
from lightning_moe_strategy.mesh import ParallelDims, build_dense_meshes, build_expert_meshes
from lightning_moe_strategy.placement import Placement, place
from tests.families import make_model

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MINUTE = timedelta(minutes=1)
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "mixtral")
CP2: dict[str, int] = dict(d_rep=2, fsdp=1, cp=2, e_fsdp=2, ep=2)
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "copies of experts": (dict(fsdp=2, cp=2, e_rep=2, e_fsdp=1, ep=2), {}),
    "more shards than experts": (
        dict(fsdp=4, e_fsdp=4, ep=1),
        dict(num_experts=2, num_local_experts=2, n_routed_experts=2),
    ),
    "shards of unequal size": (
        dict(fsdp=4, e_fsdp=2, ep=2),
        dict(num_experts=6, num_local_experts=6, n_routed_experts=6, hidden_size=35, moe_intermediate_size=15),
    ),
}
"""Degrees, and changes to the sizes of the families."""


_VALUES = "values.pt"


def write_folder(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model with numbers everywhere, in several files. Of one dtype, but for what its family keeps in FP32."""
    model = make_model(family, **changes)
    if dtype != torch.float32:
        built = model_on_meta(model.config, dtype).state_dict()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in built:
                tensor.data = tensor.data.to(built[name].dtype)
        model.config.dtype = dtype
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    model.save_pretrained(folder, max_shard_size="30KB")
    values = dict((*model.named_parameters(), *model.named_buffers()))
    torch.save({name: t.detach().to(saved_dtype(t)) for name, t in values.items()}, folder / _VALUES)
    return model


def on_meta(folder: Path) -> nn.Module:
    return model_on_meta(read_config(folder), torch.float32)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(file)
    return tensors


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that only one has, or whose dtypes or bits differ."""
    both = found.keys() & expected.keys()
    others = [k for k in both if found[k].dtype != expected[k].dtype or not torch.equal(found[k], expected[k])]
    return sorted(found.keys() ^ expected.keys()) + sorted(others)


class Root(nn.Module):
    """As HFCausalLM has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_BS: Tensor) -> Any:
        return self.model(input_ids=input_ids_BS, use_cache=False)


def placed(root: nn.Module, degrees: dict[str, int], *, values_will_be_loaded: bool = False) -> Placement:
    dims = ParallelDims(**degrees).resolve(dist.get_world_size(), local_world_size=dist.get_world_size())
    dense = build_dense_meshes(dims, "cpu", MINUTE)
    placement = Placement(
        dims=dims, dense=dense, context_parallel=ContextParallel(dense.cp_group, None), experts=find_experts(root)
    )
    place(
        root,
        placement,
        device=torch.device("cpu"),
        timeout=MINUTE,
        compute_dtype=None,
        init_seed=3,
        values_will_be_loaded=values_will_be_loaded,
    )
    return placement


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_on_ranks(folders: dict[str, str], degrees: dict[str, int], is_saved: bool) -> dict[str, tuple[list[str], int]]:
    """Of each family: names of tensors that came out otherwise than they were written, and bytes read here."""
    found: dict[str, tuple[list[str], int]] = {}
    counts: list[int] = []
    initialized: list[str] = []
    read, initialize = WeightFiles.read, initialization._initialize_whole

    def recorded(module: nn.Module, name: str, *others: Any) -> list[str]:
        initialized.append(name)
        return initialize(module, name, *others)

    def counted(files: WeightFiles, key: str, box: Any) -> Tensor:
        part = read(files, key, box)
        counts.append(part.numel() * part.element_size())
        return part

    for family, folder in folders.items():
        root = Root(on_meta(Path(folder)))
        load_pretrained(root.model, folder)
        counts.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightFiles, "read", counted)
            patch.setattr(initialization, "_initialize_whole", recorded)
            placed(root, degrees)
        assert all("rotary" in name for name in initialized), "what is read needs no random numbers"
        own = {name: whole(t) for name, t in (*root.model.named_parameters(), *root.model.named_buffers())}
        found[family] = (differing(own, torch.load(f"{folder}/{_VALUES}")), sum(counts))
        if is_saved:
            save(root, folder)
    return found


def save(root: nn.Module, folder: str) -> None:
    world = dist.group.WORLD
    assert world is not None
    hyperparameters = {"config": plain_config(read_config(folder))}
    save_directory(
        f"{folder}/saved",
        {"state_dict": root.state_dict()},
        {"hyper_parameters": hyperparameters},
        layout={"world_size": world.size()},
        versions={},
        group=world,
    )


def expected_bytes(folder: Path, degrees: dict[str, int]) -> int:
    """Every byte once for each copy of it: copies of dense parameters, of experts, and a buffer on every rank."""
    model, total = on_meta(folder), 0
    experts = tuple(find_experts(model))
    buffers = [name for name, _ in model.named_buffers()]
    weights = PretrainedWeights(model, folder)
    for made in weights.made:
        num_bytes = sum(weights.files.tensors[source].num_bytes for source in made.sources)
        if made.name in buffers:
            total += 4 * num_bytes
        else:
            total += num_bytes * degrees.get("e_rep" if made.name.startswith(experts) else "d_rep", 1)
    return total


def load_and_check(
    ranks: Callable[..., list[Any]], folders: dict[str, Path], degrees: dict[str, int], *, is_saved: bool = False
) -> None:
    paths = {family: str(folder) for family, folder in folders.items()}
    on_all = ranks(load_on_ranks, paths, degrees, is_saved)
    for family, folder in folders.items():
        assert [answers[family][0] for answers in on_all] == [[]] * 4, family
        assert sum(answers[family][1] for answers in on_all) == expected_bytes(folder, degrees), family


def test_a_folder_goes_onto_four_ranks_and_comes_back_bit_for_bit(ranks4, tmp_path):
    """Every rank fills its part and reads no more; what is saved then without a step becomes the same folder."""
    folders = {family: tmp_path / family for family in FAMILIES}
    for family, folder in folders.items():
        write_folder(folder, family, torch.bfloat16)
    load_and_check(ranks4, folders, CP2, is_saved=True)
    for family, folder in folders.items():
        expected = stored_tensors(folder)
        for like in (None, folder):
            out = folder / f"out_{like is None}"
            out_of_checkpoint(str(folder / "saved"), out, like=like, max_shard_bytes=40_000)
            assert differing(stored_tensors(out), expected) == [], family
            assert len(list(out.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_fills_its_part_on_any_layout(layout, ranks4, tmp_path):
    degrees, changes = LAYOUTS[layout]
    folders = {family: tmp_path / family for family in ("qwen3_moe", "gpt_oss")}
    for family, folder in folders.items():
        write_folder(folder, family, torch.bfloat16, **changes)
    load_and_check(ranks4, folders, degrees)


def shard_rows_of_gate_and_up(folder: str) -> list[str]:
    """A cut along dim 1, where gate and up lie one after the other; the loader of transformers gives wrong rows."""
    model = on_meta(Path(folder))
    dims = ParallelDims(fsdp=2, e_fsdp=2, ep=1).resolve(2, local_world_size=2)
    mesh = build_expert_meshes(dims, "cpu", MINUTE).shard_mesh
    for experts in find_experts(model).values():
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    model.to_empty(device="cpu")
    PretrainedWeights(model, Path(folder)).load()
    values = torch.load(f"{folder}/{_VALUES}")
    return differing({k: whole(v) for k, v in model.state_dict().items()}, {k: values[k] for k in model.state_dict()})


def test_a_cut_through_gate_and_up_gets_the_right_rows(ranks2, tmp_path):
    write_folder(tmp_path, "qwen3_moe")
    assert ranks2(shard_rows_of_gate_and_up, str(tmp_path)) == [[], []]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("family", ["kimi_linear", "ernie4_5_moe", "mixtral"])
def test_import_and_export_return_the_same_folder(family, tmp_path):
    model = write_folder(tmp_path / "hf", family, torch.bfloat16)
    into_checkpoint(tmp_path / "hf", str(tmp_path / "start"), max_part_bytes=1000)
    # torch's own reader.
    state = {name: torch.empty_like(t, dtype=saved_dtype(t)) for name, t in model.state_dict().items()}
    load_distributed(
        {"state_dict": {f"model.{k}": v for k, v in state.items()}}, checkpoint_id=tmp_path / "start", no_dist=True
    )
    assert all(torch.equal(state[name], tensor.to(saved_dtype(tensor))) for name, tensor in model.state_dict().items())
    num_bytes = out_of_checkpoint(str(tmp_path / "start"), tmp_path / "out")
    expected = stored_tensors(tmp_path / "hf")
    assert differing(stored_tensors(tmp_path / "out"), expected) == []
    assert num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in expected.values())


def saved_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


def test_dtypes_are_those_of_the_files_that_are_followed(tmp_path):
    """A published router may be in bf16, where transformers keeps it in FP32."""
    write_folder(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    rewrite(tmp_path / "hf", lambda t: {name: t[name].bfloat16() if "gate.weight" in name else t[name] for name in t})
    into_checkpoint(tmp_path / "hf", str(tmp_path / "start"))
    out_of_checkpoint(str(tmp_path / "start"), tmp_path / "out", like=tmp_path / "hf")
    assert differing(stored_tensors(tmp_path / "out"), stored_tensors(tmp_path / "hf")) == []


def test_what_is_no_arrangement_of_parts_is_computed_whole(tmp_path):
    """inkling2 drops rows of its head when it is read and appends zeros when it is written."""
    changes: dict[str, Any] = dict(unpadded_vocab_size=90)
    model = make_model("inkling2_text", **changes)
    model.save_pretrained(tmp_path / "hf")
    weights = PretrainedWeights(on_meta(tmp_path / "hf"), tmp_path / "hf")
    computed = {made.name.split(".")[-2] for made in weights.made if made.pieces is None}
    assert computed == {"experts", "lm_head"}
    into_checkpoint(tmp_path / "hf", str(tmp_path / "start"), max_part_bytes=1000)
    out_of_checkpoint(str(tmp_path / "start"), tmp_path / "out")
    assert differing(stored_tensors(tmp_path / "out"), stored_tensors(tmp_path / "hf")) == []


def test_tied_weights_are_read_once_and_stay_one(tmp_path):
    model = write_folder(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored_tensors(tmp_path)
    loaded = HFCausalLM(pretrained=str(tmp_path)).model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert differing(loaded.state_dict(), model.state_dict()) == []


def test_layers_for_multi_token_prediction_are_left_alone_as_transformers_does(tmp_path):
    model = write_folder(tmp_path, "glm4_moe")
    ignored = model._keys_to_ignore_on_load_unexpected
    assert ignored
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.92.eh_proj.weight": torch.ones(3)})
    assert differing(HFCausalLM(pretrained=str(tmp_path)).model.state_dict(), model.state_dict()) == []


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """All tensors into one file, after a change."""
    tensors = change(stored_tensors(folder))
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink(missing_ok=True)
    safetensors_torch.save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: {k: t for k, t in tensors.items() if k not in names})


def with_tensor(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors | {name: tensor})


def cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def damage_a_header(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[20:24] = b"\xff\x00{{"
    file.write_bytes(content)


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


def lead_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def empty(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()


def shift_an_expert(folder: Path) -> None:
    """As many as there have to be, with the number of one that does not exist."""
    name, other = EXPERT.format(1), EXPERT.format(4)
    rewrite(folder, lambda tensors: {other if key == name else key: tensor for key, tensor in tensors.items()})


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another vocabulary": (
        with_tensor("model.embed_tokens.weight", torch.ones(120, 32)),
        r"embed_tokens.weight is \[120, 32\] there and \[97, 32\] in the model",
    ),
    "no expert of a layer in the middle": (
        without(EXPERT.format(1)),
        r"needs model.layers.1.mlp.experts.1.up_proj.weight",
    ),
    "an expert with a number too high": (shift_an_expert, r"needs model.layers.1.mlp.experts.1.up_proj.weight"),
    "no last expert": (without(EXPERT.format(3)), r"experts.gate_up_proj|experts.3.up_proj"),
    "no last expert at all": (
        without(EXPERT.format(3), EXPERT.format(3).replace("up", "gate"), EXPERT.format(3).replace("up", "down")),
        r"needs .*layers.1.mlp.experts.3.(down|gate)_proj.weight.*, which the files do not have",
    ),
    "no norm": (without("model.norm.weight"), r"needs model.norm.weight, which the files do not have"),
    "an expert too many": (
        with_tensor("model.layers.1.mlp.experts.4.down_proj.weight", torch.ones(32, 16)),
        r"down_proj is \[5, 32, 16\] there and \[4, 32, 16\]",
    ),
    "a tensor too many": (
        with_tensor("model.layers.0.mlp.shared_expert.up_proj.weight", torch.ones(3)),
        r"files have model.layers.0.mlp.shared_expert.up_proj.weight, which the model does not have",
    ),
    "numbers of eight bits": (
        with_tensor("model.norm.weight", torch.ones(32).to(torch.float8_e4m3fn)),
        "model.norm.weight is float8_e4m3fn and model.norm.weight float32",
    ),
    "whole numbers": (
        with_tensor("model.norm.weight", torch.ones(32, dtype=torch.int64)),
        "model.norm.weight is int64 and model.norm.weight float32",
    ),
    "quantised": (quantise, r"is quantised \(fp8\)"),
    "a file cut short": (cut_short, r"bytes, and its header says"),
    "a file missing": (lose_a_file, rf"has no model-00002-of-\d+.safetensors, which its {INDEX} names"),
    "a damaged header": (damage_a_header, "no safetensors file, or a damaged one"),
    "an index that leads outside": (lead_outside, r"names \.\./elsewhere.safetensors, outside of its folder"),
    "no weights": (empty, f"has neither {INDEX} nor model.safetensors"),
}


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write_folder(folder, "qwen3_moe")
    return folder


@pytest.mark.parametrize("wrong", WRONG)
def test_a_folder_that_does_not_fit_is_one_error_and_changes_nothing(wrong, qwen_folder, tmp_path):
    break_it, message = WRONG[wrong]
    shutil.copytree(qwen_folder, tmp_path, dirs_exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(read_config(tmp_path), dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_pretrained(model, tmp_path)
    assert str(tmp_path) in str(raised.value) and str(raised.value).endswith((".", "()."))
    assert differing(model.state_dict(), before) == []


def test_two_tensors_that_the_model_ties_have_to_be_equal(tmp_path):
    write_folder(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    HFCausalLM(pretrained=str(tmp_path))
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="other numbers for lm_head.weight than for model.embed_tokens.weight"):
        HFCausalLM(pretrained=str(tmp_path))


def place_with_a_file_cut_short_on_one(folder: str) -> tuple[list[str], bool, bool]:
    """Messages, for a checkpoint that may lack weights too; what had memory then; and whether a whole one does it."""
    root, messages = Root(on_meta(Path(folder))), []
    own = Path(folder, str(dist.get_rank()))  # as if rank 1 had a disk of its own
    shutil.copytree(folder, own, ignore=shutil.ignore_patterns("0", "1"))
    load_pretrained(root.model, own)
    if dist.get_rank() == 1:
        cut_short(own)
    layout = dict(fsdp=2, e_fsdp=1, ep=2)
    for is_strict in (True, False):
        root.strict_loading = is_strict  # type: ignore[assignment]
        with pytest.raises(RuntimeError) as raised:
            placed(root, layout, values_will_be_loaded=not is_strict)
        messages.append(str(raised.value))
    nothing_allocated = all(parameter.is_meta for parameter in root.parameters())
    root.strict_loading = True  # type: ignore[assignment]
    placed(root, layout, values_will_be_loaded=True)
    return messages, nothing_allocated, not any(parameter.is_meta for parameter in root.parameters())


def test_all_ranks_raise_what_is_wrong_before_anything_has_memory(ranks2, qwen_folder, tmp_path):
    """And a checkpoint that has all weights needs no folder."""
    shutil.copytree(qwen_folder, tmp_path, dirs_exist_ok=True)
    for messages, nothing_allocated, is_placed in ranks2(place_with_a_file_cut_short_on_one, str(tmp_path)):
        assert all("its header says" in message for message in messages) and nothing_allocated and is_placed


def test_a_number_that_reads_otherwise_is_noticed(qwen_folder, monkeypatch):
    model = on_meta(qwen_folder).to_empty(device="cpu")
    weights = PretrainedWeights(model, qwen_folder)
    read = WeightFiles.read
    monkeypatch.setattr(WeightFiles, "read", lambda files, key, box: read(files, key, box) + 1)
    with pytest.raises(CheckpointError, match="the disk reads wrong"):
        weights.load()


def test_hyperparameters_hold_the_configuration_and_not_the_folder(qwen_folder):
    with torch.device("meta"):
        module = HFCausalLM(pretrained=str(qwen_folder))
    assert all(parameter.is_meta for parameter in module.model.parameters())
    assert set(module.hparams) & {"pretrained", "config"} == {"config"}
    again = HFCausalLM(**module.hparams)
    assert again.model.config.to_diff_dict() == module.model.config.to_diff_dict()
    with pytest.raises(ValueError, match="needs a config or a folder"):
        HFCausalLM()
    with pytest.raises(ValueError, match=r"pretrained\('org/model'\) is no folder here, and nothing is downloaded"):
        HFCausalLM(pretrained="org/model")


@pytest.mark.parametrize("operation", ["stack", "cat", "chunk", "split", "unbind", "transpose"])
def test_pieces_say_where_every_number_of_a_result_comes_from(operation):
    values = {"a": torch.arange(24.0).view(4, 6), "b": 100 + torch.arange(24.0).view(4, 6)}
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "stack": lambda a, b: torch.stack([a, b], dim=1),
        "cat": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=-1),
        "chunk": lambda a, b: torch.chunk(torch.cat([a, b], dim=0), 3, dim=0)[1],
        "split": lambda a, b: torch.split(torch.cat([a, b], dim=1), [5, 7], dim=1)[1].contiguous(),
        "unbind": lambda a, b: torch.unbind(torch.stack([a, b], dim=1), dim=0)[2],
        "transpose": lambda a, b: torch.transpose(torch.cat([a, b], dim=1), dim0=0, dim1=1),
    }
    run = operations[operation]
    mosaic = run(*(Mosaic.of(name, tuple(t.shape), t.dtype) for name, t in values.items()))
    expected = run(*values.values())
    assert mosaic.shape == expected.shape
    box = tuple(slice(length // 3, length - length // 4) for length in expected.shape)
    found = torch.full_like(expected, float("nan"))
    for piece in mosaic.pieces:
        part = piece.inside(box)
        if part is not None:
            found[part.box] = part.arrange(values[part.key][part.other_box])
    assert torch.equal(found[box], expected[box])
    assert int(found.isnan().sum()) == expected.numel() - expected[box].numel()


def test_a_streamed_checkpoint_keeps_one_part_in_memory_and_leaves_nothing_when_it_dies(tmp_path):
    alive: list[int] = []
    parts: list[Tensor] = []

    def rows(first: int, last: int) -> Tensor:
        parts.append(torch.arange(float(first), float(last)))
        alive.append(sum(part.untyped_storage().nbytes() for part in parts))
        if last > 900:
            raise OSError(28, "No space left on device")
        return parts[-1]

    path = tmp_path / "start"
    with pytest.raises(CheckpointError, match="was not saved.*No space left on device.*Free space"):
        write_streamed(
            str(path),
            [StreamedTensor("state_dict.x", (1000,), torch.float32, rows)],
            {},
            versions={},
            max_part_bytes=400,
        )
    assert list(tmp_path.iterdir()) == [] and len(alive) == 10
    assert max(alive) == 400


def test_an_export_holds_less_than_a_layer(tmp_path, monkeypatch):
    """Bytes of the tensors that were read and are alive, whenever one is written, and of that one."""
    write_folder(tmp_path / "hf", "qwen3_moe", num_experts=16)
    into_checkpoint(tmp_path / "hf", str(tmp_path / "start"))
    layer = sum(t.nbytes for k, t in stored_tensors(tmp_path / "hf").items() if k.startswith("model.layers.0."))
    read, write = OpenCheckpoint.tensor, ShardWriter.write
    alive: list[weakref.ref[Tensor]] = []
    peaks: list[int] = []

    def watched_read(checkpoint: OpenCheckpoint, key: str) -> Tensor:
        tensor = read(checkpoint, key)
        alive.append(weakref.ref(tensor))
        return tensor

    def watched_write(writer: ShardWriter, name: str, values: Tensor) -> None:
        peaks.append(values.nbytes + sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
        write(writer, name, values)

    monkeypatch.setattr(OpenCheckpoint, "tensor", watched_read)
    monkeypatch.setattr(ShardWriter, "write", watched_write)
    out_of_checkpoint(str(tmp_path / "start"), tmp_path / "out")
    assert 0.5 * layer < max(peaks) < 0.8 * layer


def test_the_header_of_what_is_written_is_one_that_safetensors_reads(tmp_path):
    write_folder(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    into_checkpoint(tmp_path / "hf", str(tmp_path / "start"))
    out_of_checkpoint(str(tmp_path / "start"), tmp_path / "out", dtype=torch.float16)
    tensors = read_header(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert kept == {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float16


def test_every_tensor_begins_where_its_numbers_can_be_read_in_place(tmp_path):
    values = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.arange(2.0),
        "c": torch.tensor(7),
        "d": torch.ones(0),
    }
    new = [NewTensor(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in values.items()]
    writer = ShardWriter(tmp_path, new, max_bytes=1000)
    for name in reversed(values):
        writer.write(name, values[name])
    writer.close()
    tensors = read_header(tmp_path / "model.safetensors")
    assert all(tensor.first_byte % tensor.dtype.itemsize == 0 for tensor in tensors.values())
    assert differing(stored_tensors(tmp_path), values) == []
