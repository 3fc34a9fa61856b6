"""What errors of loads say to do, where the names of target and checkpoint tell."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from ckptio import PerRank, sync
from ckptio.errors import MismatchError, TargetError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_target_that_is_a_level_off_is_told(engine: sync.Engine, tmp_path: Path) -> None:
    """The error says what to pass instead, with a selection and without."""
    net = torch.nn.Linear(3, 2)
    engine.save({"run": {"model": net, "optim": {"lr": 1}}}, tmp_path / "c")
    engine.save(net, tmp_path / "alone")
    for select in (None, "run.model"):
        with pytest.raises(MismatchError, match=r"pass into=\{'run': \{'model': target\}\}"):
            engine.load(tmp_path / "c", into=net, select=select)
    with pytest.raises(MismatchError, match="those below 'model' of the target"):
        engine.load(tmp_path / "alone", into={"model": net.state_dict()})
    engine.load(tmp_path / "c", into={"run": {"model": net}}, select="run.model")


@pytest.mark.parametrize(
    ("saved", "target", "hint"),
    [
        ({"m": {"l.weight": 1}}, {"m": {"l": {"weight": 1}}}, "'m.l.weight' is in both"),
        ({1: 1}, {"1": 1}, "'1' is in both, but is not the same key: of 1, '1', True and an enum"),
        ({"m": {"module.w": 1}}, {"m": {"w": 1}}, "names have 'module.': load into a wrapped"),
        ({"m": {"_orig_mod.w": 1}}, {"m": {"w": 1}}, "; and save the module before torch.compile"),
        ({"m": {"w": 1}}, {"m": {"_orig_mod.w": 1}}, "load into the module before torch.compile"),
        (
            {"m": {"_orig_mod.module.w": 1}},
            {"m": {"w": 1}},
            "names have '_orig_mod.' and 'module.': load into a module that is wrapped",
        ),
        (
            {"m": {"w": 1}},
            {"m": {"_orig_mod.module.w": 1}},
            "names have '_orig_mod.' and 'module.': load into the module inside of both wrappers",
        ),
        (
            {"m": {"_orig_mod.module.w": 1}},
            {"m": {"module.w": 1}},
            "names have '_orig_mod.': load into a compiled module",
        ),
        (
            {"m": {"_orig_mod.w": 1}},
            {"m": {"module.w": 1}},
            "checkpoint's names have '_orig_mod.' and the target's 'module.': load into a module",
        ),
        (
            {"m": {"_orig_mod.module.w": 1}},
            {"m": {"module._orig_mod.w": 1}},
            "load into a module wrapped like the one that was saved",
        ),
        ({"m": {"w": torch.ones(1)}}, {"m": {}}, "'m' of the target is empty: None in its place"),
        ({"q": {"a": [1]}}, {"q": defaultdict(list)}, "'q' of the target is empty: None in its"),
        (
            {"o": {"state": {0: {"step": 1}}, "param_groups": []}},
            {"o": {"state": {"net.w": {"step": 1}}, "param_groups": []}},
            "'o.state' by numbers of parameters, and the target by names: load it into the optim",
        ),
        (
            {"m": {"weight_g": torch.ones(2, 1), "weight_v": torch.ones(2, 2), "bias": 1}},
            {"m": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))},
            "'m' has code that may know these names as older ones: give what load() returns for",
        ),
        (
            {"m": {"0.w": 1}},
            {"m": {"0": torch.nn.Linear(2, 2)}},
            "have such keys in 'm', {'0.w': tensor}",
        ),
        (
            {"m": {"_orig_mod.module.w": 1}},
            {"m": {"_orig_mod.module": torch.nn.Linear(2, 2)}},
            "have such keys in 'm', {'_orig_mod.module.w': tensor}",
        ),
        (
            {"m": {"c": 1}, "m.n": {"x.w": 1}},
            {"m": {"c": torch.ones(2)}, "m.n": {"x": torch.nn.Linear(2, 2)}},
            "have such keys in 'm.n', {'x.w': tensor}",
        ),
        ({"0.w": 1}, {"0": torch.nn.Linear(2, 2)}, "have such keys in the target, {'0.w': tensor}"),
        (
            {"b": 1, "a": {"x": 2}},
            {"net": {"a": {"x": 0}, "b": 0}, "head": 0},
            "the checkpoint's names are those below 'net' of the target: pass that alone",
        ),
        (
            {"run": {"model": {"w": 1, "b": 2}}, "step": 3},
            {"net": {"b": 0, "w": 0}, "step": 0},
            "into={'run': {'model': target['net']}}, and beside it what else is to be loaded",
        ),
        (
            {"model": torch.nn.Linear(2, 2)},
            {"net": torch.nn.Linear(2, 2)},
            "has below 'model': pass into={'model': target['net']}; load_with_report",
        ),
        (
            {"models": [torch.nn.Linear(2, 2)]},
            torch.nn.Linear(2, 2),
            "those below 'models.0': take them from what load() returns without into=",
        ),
        (
            {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))},
            torch.nn.Linear(2, 2),
            "those below 'model.0': take them from what load() returns without into=",
        ),
        (
            {1: torch.nn.Linear(2, 2), "z": 1},
            {"net": torch.nn.Linear(2, 2)},
            "if these are the same under other names: rename the keys of what load() returns",
        ),
        (
            {"actor": torch.nn.Linear(2, 2), "critic": torch.nn.Linear(2, 2)},
            torch.nn.Linear(2, 2),
            "those below 'actor' or 'critic': pass into={'actor': target}",
        ),
        ({"attn_module.w": 1}, {"attn_w": 1}, "if these are the same under other names: rename"),
    ],
)
def test_names_that_a_wrapper_or_a_nesting_changed_are_explained(
    tmp_path: Path, saved: Any, target: Any, hint: str
) -> None:
    """What is in the way is said, not only what is missing."""
    sync.save(saved, tmp_path / "c")
    with pytest.raises(MismatchError, match=re.escape(hint)):
        sync.load(tmp_path / "c", into=target)


def test_names_that_from_pretrained_would_convert_are_explained(tmp_path: Path) -> None:
    """Of a file of safetensors, where other names are in the way, and nothing else is known."""
    save_file({"experts.0.w1.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    target = {"experts.gate_up_proj": torch.zeros(2)}
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(MismatchError, match=r"as they are in the file.*from_pretrained\(\)"):
            sync.load(path, into=target)
    more = {"experts.0.w1.weight": torch.zeros(2), **target}
    with pytest.raises(MismatchError) as caught:
        sync.load(tmp_path, into=more)
    assert "from_pretrained" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_a_prefix_of_all_names_is_told_as_that_of_a_wrapper(tmp_path: Path, prefix: str) -> None:
    """As in a file of a whole state_dict: its keys have it, and it is no key of its own."""
    net = torch.nn.Linear(2, 2)
    stored = {f"{prefix}{name}": tensor for name, tensor in net.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    torch.save(stored, tmp_path / "old.pt")
    for path in (tmp_path, tmp_path / "old.pt"):
        with pytest.raises(MismatchError, match="or into a dict of the target's tensors"):
            sync.load(path, into=net)
    target = {f"{prefix}{name}": tensor for name, tensor in net.state_dict().items()}
    sync.load(tmp_path / "old.pt", into=target)
    sync.save({"module": net}, tmp_path / "nested")
    with pytest.raises(MismatchError, match=r"pass into=\{'module': target\}"):
        sync.load(tmp_path / "nested", into=net)


def test_another_floating_point_type_is_told_what_converts(tmp_path: Path) -> None:
    """Where that is all that differs."""
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    sync.save(state, tmp_path / "c")
    target = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in state.items()}
    with pytest.raises(MismatchError, match=r"dtype=torch\.bfloat16 converts"):
        sync.load(tmp_path / "c", into=target)
    sync.load(tmp_path / "c", into=target, dtype=torch.bfloat16)
    target["a"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(MismatchError) as caught:
        sync.load(tmp_path / "c", into=target)
    assert "converts" not in str(caught.value)


def test_another_floating_point_type_is_told_beside_names(tmp_path: Path) -> None:
    """As where a head is new; nothing else is promised of it."""
    sync.save({"a": torch.ones(2), "old": torch.ones(3)}, tmp_path / "c")
    target = {"a": torch.zeros(2, dtype=torch.bfloat16), "new": torch.zeros(3)}
    told = r"dtype=torch\.bfloat16 converts what is of another type; load_with"
    with pytest.raises(MismatchError, match=told):
        sync.load(tmp_path / "c", into=target)


def test_names_that_differ_are_told_how_to_be_renamed(tmp_path: Path) -> None:
    """Both other ways out leave the model as it was made."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(1, 1)})
    sync.save({"model": model, "step": 1}, tmp_path / "c")
    other = torch.nn.ModuleDict({"backbone": torch.nn.Linear(1, 1)})
    with pytest.raises(MismatchError, match=r"rename the keys of what load\(\) .* load_state_dict"):
        sync.load(tmp_path / "c", into={"model": other, "step": 0})
    with pytest.raises(MismatchError, match=r"rename .* without into=; load_with"):
        sync.load(tmp_path / "c", into={"model": dict(other.state_dict()), "step": 0})
    with pytest.raises(MismatchError) as caught:
        sync.load(tmp_path / "c", into={"step": 0})
    assert "rename" not in str(caught.value)


@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_a_selection_that_the_target_has_under_another_name_is_told(
    engine: sync.Engine, tmp_path: Path, strict: Any
) -> None:
    """It asked for nothing then, and its weights stayed as they were made."""
    engine.save({"model": torch.nn.Linear(2, 2), "step": 1}, tmp_path / "c")
    target = {"net": torch.nn.Linear(2, 2)}
    told = (
        "'net' what the checkpoint has below 'model'" if strict == "raise" else "neither 'model.w"
    )
    with pytest.raises(TargetError, match=told):
        engine.load(tmp_path / "c", into=target, select="model", strict=strict)
    engine.load_with_report(tmp_path / "c", into=target, select="model", strict="report")
    more = {**target, "step": 0}
    engine.load(tmp_path / "c", into=more, select=["model", "step"], strict="ignore")
    assert more["step"] == 1


@pytest.mark.parametrize("select", ["modle", ["modle", "*.wieght"], lambda _: False])
def test_a_selection_of_nothing_is_told_also_where_what_fits_would_do(
    engine: sync.Engine, tmp_path: Path, select: Any
) -> None:
    """A mistyped name is no reason to train on from what was made at random."""
    engine.save({"model": torch.nn.Linear(2, 2), "each": PerRank(1)}, tmp_path / "c")
    target: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "each": PerRank(0)}
    with pytest.raises(TargetError, match="select= accepts no name that checkpoint"):
        engine.load(tmp_path / "c", into=target, select=select, strict="ignore")
    engine.load_with_report(tmp_path / "c", into=target, select=select)
    engine.load(tmp_path / "c", into=target, select=["modle", "each"], strict="ignore")
    assert target["each"].value == 1


def test_no_place_is_named_where_there_are_several(engine: sync.Engine, tmp_path: Path) -> None:
    """Following it, an actor would get the weights of a critic that is made alike."""
    nets = {name: torch.nn.Linear(2, 2) for name in ("value", "policy")}
    engine.save(nets, tmp_path / "c")
    target = {name: torch.nn.Linear(2, 2) for name in ("actor", "critic")}
    for select in (None, "policy"):
        with pytest.raises(MismatchError) as caught:
            engine.load(tmp_path / "c", into=target, select=select)
        assert "pass into=" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "target"),
    [
        ({"ema": torch.nn.Linear(2, 2)}, {}),
        ({"teacher": {"model": torch.nn.Linear(2, 2)}}, {}),
        ({"step": 1}, {"run": {"step": 0}}),
    ],
)
def test_no_other_place_is_named_where_the_checkpoint_has_that_of_the_target(
    engine: sync.Engine, tmp_path: Path, more: dict[str, Any], target: dict[str, Any]
) -> None:
    """What it has beside it may look like it, and is something else; unless it is selected."""
    engine.save({"model": torch.nn.Linear(2, 2), **more}, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        engine.load(tmp_path / "c", into={"model": torch.nn.Linear(2, 2), **target})
    assert "pass " not in str(caught.value)
    if "ema" in more:
        with pytest.raises(MismatchError, match=r"pass into=\{'ema': target\['model'\]\}"):
            engine.load(tmp_path / "c", into={"model": torch.nn.Linear(2, 2)}, select="ema")


def test_an_object_beside_what_differs_is_not_asked_for_its_state(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """It may be a data loader, which moves then; or may have all ranks do it."""
    engine.save({"model": torch.nn.Linear(2, 2), "step": 1}, tmp_path / "c")
    asked: list[str] = []

    class Loader:
        def state_dict(self) -> dict[str, int]:
            asked.append("state_dict")
            return {"position": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError(state)

    target = {"net": torch.nn.Linear(2, 2), "data": Loader()}
    with pytest.raises(MismatchError, match="has below 'model': pass into="):
        engine.load(tmp_path / "c", into=target, select="model")
    assert asked == []


def test_an_object_that_is_the_target_is_asked_for_its_state_once(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """On the rank that differs alone, it would wait for those that are not asked again."""
    engine.save({"w": torch.ones(2)}, tmp_path / "c")
    asked: list[str] = []

    class Run:
        def state_dict(self) -> dict[str, Any]:
            asked.append("state_dict")
            return {"w": torch.zeros(2), "extra": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    with pytest.raises(MismatchError, match="'extra'"):
        engine.load(tmp_path / "c", into=Run())
    assert asked == ["state_dict"]


def test_a_backbone_from_another_program_is_told_where_to_go(tmp_path: Path) -> None:
    """Whatever the order of names in its file is."""
    body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    whole = torch.nn.ModuleDict({"backbone": body, "head": torch.nn.Linear(2, 1)})
    save_file(body.state_dict(), tmp_path / "body.safetensors")
    with pytest.raises(MismatchError, match="those below 'backbone' of the target: pass that"):
        sync.load(tmp_path / "body.safetensors", into=whole)
    sync.load(tmp_path / "body.safetensors", into=whole["backbone"])
