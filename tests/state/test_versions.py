"""Versions of modules: they go with the values they belong to, on every way back."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptio import sync
from ckptio.errors import FormatError, MismatchError, UnsupportedLeafError
from ckptio.format.encode import TAG
from ckptio.state.flatten import flatten
from ckptio.state.rebuild import Rebuilder
from ckptio.state.target import Matcher
from tests.state.test_records import Keeper
from tests.state.test_target import matched
from tests.strategies import SMALL, assert_same, with_versions

if TYPE_CHECKING:
    from pathlib import Path


class Old(torch.nn.Module):
    """A layer that keeps the logarithm of its scale."""

    def __init__(self, scale: float = 0.0, size: int = 2) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((size,), float(scale)))
        self.shift = torch.nn.Parameter(torch.full((size,), float(scale)))


class New(Old):
    """Its next release, which keeps the scale itself, and the two the other way round."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *more: Any
    ) -> None:
        if metadata.get("version", 0) < 2:
            scale, shift = state[prefix + "shift"].exp(), state[prefix + "scale"]
            state[prefix + "scale"], state[prefix + "shift"] = scale, shift
        super()._load_from_state_dict(state, prefix, metadata, *more)


class Trainer:
    """A stateful object that has a module, as many programs do."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "step": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


def values(net: torch.nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def old(scale: float, shift: float) -> Old:
    net = Old()
    with torch.no_grad():
        net.scale.fill_(scale)
        net.shift.fill_(shift)
    return net


CURRENT = {"scale": [3.0, 3.0], "shift": [5.0, 5.0]}
MIGRATED = {"scale": [1.0, 1.0], "shift": [7.0, 7.0]}


def current() -> New:
    net = New()
    net.load_state_dict(with_versions(old(3, 5).state_dict(), {"": {"version": 2}}))
    assert values(net) == CURRENT
    return net


@pytest.mark.parametrize("wrap", [lambda net: {"m": net}, lambda net: {"t": Trainer(net)}])
@pytest.mark.parametrize(("saved", "expected"), [(current, CURRENT), (lambda: old(7, 0), MIGRATED)])
def test_a_module_takes_what_is_of_its_version_and_mends_what_is_older(
    tmp_path: Path, wrap: Any, saved: Any, expected: Any
) -> None:
    """Of its own, of a stateful object's, and as `load_state_dict` takes what `load` gives."""
    sync.save(wrap(saved()), tmp_path / "c", config=SMALL)
    net = New(9)
    sync.load(tmp_path / "c", into=wrap(net))
    assert values(net) == expected
    state = sync.load(tmp_path / "c")
    net = New(9)
    net.load_state_dict(state["m"] if "m" in state else state["t"]["net"])
    assert values(net) == expected


def test_a_file_of_torch_save_keeps_its_versions(tmp_path: Path) -> None:
    """Here, and on the way back."""
    torch.save({"m": old(7, 0).state_dict()}, tmp_path / "old.pt")
    net = New(9)
    sync.load(tmp_path / "old.pt", into={"m": net})
    assert values(net) == MIGRATED
    torch.save(sync.load(tmp_path / "old.pt"), tmp_path / "again.pt")
    net = New(9)
    net.load_state_dict(torch.load(tmp_path / "again.pt")["m"])
    assert values(net) == MIGRATED


def test_tied_modules_are_mended_once(tmp_path: Path) -> None:
    """The values that they take are not the memory that they write to."""
    first, second = old(7, 0), Old()
    second.scale, second.shift = first.scale, first.shift
    sync.save({"m": torch.nn.Sequential(first, second)}, tmp_path / "c", config=SMALL)
    one, two = New(9), New(9)
    two.scale, two.shift = one.scale, one.shift
    sync.load(tmp_path / "c", into={"m": torch.nn.Sequential(one, two)})
    assert values(one) == MIGRATED
    assert two.scale is one.scale


def test_on_the_meta_device(tmp_path: Path) -> None:
    sync.save({"m": old(7, 0)}, tmp_path / "c", config=SMALL)
    with torch.device("meta"):
        net = New()
    sync.load(tmp_path / "c", into={"m": net})
    assert values(net) == MIGRATED


def test_partly_on_the_meta_device(tmp_path: Path) -> None:
    """What is real stays the module's own, and the module sees all of a state at once."""
    for saved, expected in ((old(7, 0), MIGRATED), (current(), CURRENT)):
        sync.save({"m": saved}, tmp_path / "c", config=SMALL, overwrite=True)
        net = New()
        shift = net.shift
        net.scale = torch.nn.Parameter(torch.empty(2, device="meta"))
        sync.load(tmp_path / "c", into={"m": net})
        assert values(net) == expected
        assert net.shift is shift


@pytest.mark.parametrize("saved", [lambda net: net, checkpoint_wrapper])
@pytest.mark.parametrize("target", [lambda net: net, checkpoint_wrapper])
@pytest.mark.parametrize(("make", "expected"), [(current, CURRENT), (lambda: old(7, 0), MIGRATED)])
def test_wrappers_are_no_modules(
    tmp_path: Path, saved: Any, target: Any, make: Any, expected: Any
) -> None:
    """They hide their names from the keys of a state, and not from versions."""
    sync.save({"m": torch.nn.Sequential(saved(make()))}, tmp_path / "c", config=SMALL)
    net = New(9)
    sync.load(tmp_path / "c", into={"m": torch.nn.Sequential(target(net))})
    assert values(net) == expected


def test_the_name_of_a_data_parallel_module_is_no_part_of_its_keys() -> None:
    """As `get_model_state_dict` has them. A module's own may be called so as well."""
    one, two = {"version": 1}, {"version": 2}
    for names in (("", "module", "module.a"), ("", "a")):
        saved = with_versions({"a.w": torch.ones(1)}, dict.fromkeys(names, one))
        for own in ("module.a", "a"):
            target = with_versions({"a.w": torch.zeros(1)}, {own: two})
            assert matched(saved, target)[1]._metadata == {own: one}
    saved = with_versions({"module.w": torch.ones(1)}, {"module": one})
    target = with_versions({"module.w": torch.zeros(1)}, {"module": two, "": two})
    assert matched(saved, target)[1]._metadata == {"module": one, "": two}


def test_a_name_as_a_wrappers_is_a_modules_own_where_one_key_has_it() -> None:
    """Whatever else is a key there."""
    for other in ("w", 7):
        saved = with_versions({"module.w": torch.ones(1), other: torch.ones(1)}, OF_BOTH[0])
        target = with_versions({other: torch.zeros(1), "module.w": torch.zeros(1)}, OF_BOTH[1])
        assert matched(saved, target)[1]._metadata == OF_BOTH[0]


#: Versions of a module and of what is in it, older and newer.
OF_BOTH = [{"": {"version": n}, "module": {"version": n}} for n in (1, 2)]


def test_a_module_without_a_state_goes_with_what_it_is_in() -> None:
    one, two = {"version": 1}, {"version": 2}
    saved = with_versions({"a.w": torch.ones(1), "b.w": torch.ones(1)}, {"a.act": one, "c": one})
    target = with_versions({"a.w": torch.zeros(1), "b.w": torch.zeros(1)}, {"a.act": two, "c": two})
    for select, expected in ((None, (one, one)), ("a", (one, two)), ("b", (two, two))):
        match, result = matched(saved, target, select)
        assert match.agrees
        assert (result._metadata["a.act"], result._metadata["c"]) == expected
        target = with_versions(dict(result), {"a.act": two, "c": two})


def test_odd_versions_in_a_file_of_torch_save_are_left_out(tmp_path: Path) -> None:
    """Nobody can change that file, and torch makes nothing of them."""
    state = with_versions({"w": torch.ones(1)}, {"": {"version": torch.ones(1)}})
    torch.save(state, tmp_path / "a.pt")
    found = sync.load(tmp_path / "a.pt")
    assert found == {"w": torch.ones(1)}
    assert not hasattr(found, "_metadata")


def test_a_part_of_an_older_module_is_refused(tmp_path: Path) -> None:
    """Half of one version and half of another: nobody can mend that. A whole one is fine."""
    saved = torch.nn.Sequential(old(7, 0), old(7, 0), torch.nn.Linear(1, 1))
    sync.save({"m": saved}, tmp_path / "c", config=SMALL)
    target = torch.nn.Sequential(New(9), New(9), torch.nn.Linear(1, 1))
    before = values(target)
    with pytest.raises(MismatchError, match=r"'m\.1: version 2 in the target, version 1 in the c"):
        sync.load(tmp_path / "c", into={"m": target}, select=["m.0", "m.1.scale"])
    assert values(target) == before
    sync.load(tmp_path / "c", into={"m": target}, select=["m.0", "m.2"])
    assert values(target[0]) == MIGRATED
    assert values(target[1]) == {"scale": [9.0, 9.0], "shift": [9.0, 9.0]}
    assert values(target[2]) == values(saved[2])
    sync.load(tmp_path / "c", into={"m": target}, select="m.1.scale", strict="ignore")
    assert values(target[1]) == {"scale": [7.0, 7.0], "shift": [9.0, 9.0]}  # as it is told to


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ({"version": 2}, "version 2 in the target"),
        ({"version": 2, "of": "x"}, "{'version': 2, 'of': 'x'} in the target"),
        (7, "7 in the target"),  # as a hook may make it
    ],
)
def test_a_module_is_named_with_all_that_it_says(own: Any, shown: str) -> None:
    """The one that is the state itself has no name."""
    values = {"a": torch.zeros(1), "b": torch.zeros(1)}
    saved, target = (with_versions(values, {"": v}) for v in ({"version": 1}, own))
    match, _ = matched(saved, target, "a")
    (found,) = match.mismatched
    assert found.startswith(f"the whole state: {shown}, version 1 in the checkpoint, ")


def test_what_has_no_versions_is_left_as_it_is() -> None:
    """What is no tensor; keys that are no names; a plain dict."""
    one, two = ({"": {"version": n}} for n in (1, 2))
    saved = with_versions({"w": torch.ones(1), "n": 3}, one)
    match, result = matched(saved, with_versions({"w": torch.zeros(1), "n": 0}, two))
    assert match.agrees
    assert (result["n"], result._metadata) == (3, one)
    match, _ = matched(saved, with_versions({"w": torch.zeros(1), "n": 0, 7: 0}, two))
    assert match.missing == ["7"]
    _, result = matched(saved, {"w": torch.zeros(1), "n": 0})
    assert type(result) is dict
    _, result = matched(saved, with_versions({"w": torch.zeros(1), "n": 0}, 7))
    assert result._metadata == one


def first_version(net: torch.nn.Module) -> Any:
    """Give the state that a batch norm within had before it counted batches."""
    state = net.state_dict()
    kept = {name: value for name, value in state.items() if "num_batches" not in name}
    versions = {name: dict(entry) for name, entry in state._metadata.items()}  # type: ignore[attr-defined]  # torch's own
    versions["1"]["version"] = 1
    return with_versions(kept, versions)


def normed(batches: int, device: str = "cpu") -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for _ in range(batches):
        net(torch.rand(3, 2))
    return net.to(device)


@pytest.mark.parametrize(
    ("wrap", "device"),
    [
        (lambda net: {"m": net}, "cpu"),
        (lambda net: {"m": net}, "meta"),
        (lambda net: {"t": Trainer(net)}, "cpu"),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_a_batch_norm_of_before_it_counted_batches_goes_on_with_its_count(
    tmp_path: Path, wrap: Any, device: str, *, is_file: bool
) -> None:
    """As it does in torch. On the meta device it has none, and begins anew."""
    saved = normed(3)
    state, path = first_version(saved), tmp_path / "c"
    target = normed(5, device)
    into = wrap(target)
    tree = {"m": state} if "m" in into else {"t": {"net": state, "step": 3}}
    if is_file:
        torch.save(tree, path)
    else:
        sync.save(tree, path, config=SMALL)
    sync.load(path, into=into)
    expected = normed(5)
    expected.load_state_dict(state)
    if device == "meta":
        expected[1].num_batches_tracked.zero_()  # type: ignore[index]  # a sequence
    assert values(target) == values(expected)


@pytest.mark.parametrize("entry", [{}, {"version": None}, {"version": "1"}])
def test_what_says_no_version_is_of_before_there_were_any(entry: dict[str, Any]) -> None:
    state = first_version(normed(3))
    state._metadata["1"] = entry
    match, _ = matched(state, normed(5).state_dict())
    assert match.agrees


def test_what_nobody_makes_up_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Other names, a count that was not stored though it was there, a part of batch norm."""
    saved = normed(3)
    state = first_version(saved)
    sync.save({"m": state}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"m\.1: version 2 .*and a part of it is loaded"):
        sync.load(tmp_path / "c", into={"m": normed(5)}, select="m.1.weight")
    del state["1.bias"]
    sync.save({"m": state}, tmp_path / "c", config=SMALL, overwrite=True)
    with pytest.raises(MismatchError, match=r"m\.1\.bias.*which lacks some of its names; what lo"):
        sync.load(tmp_path / "c", into={"m": normed(5)})
    state = first_version(saved)
    del state["1.running_mean"]
    sync.save({"m": state}, tmp_path / "c", config=SMALL, overwrite=True)
    with pytest.raises(MismatchError, match=r"2 missing.*'m\.1\.num_batches_tracked'"):
        sync.load(tmp_path / "c", into={"m": normed(5)})
    state = saved.state_dict()
    del state["1.num_batches_tracked"]
    sync.save({"m": state}, tmp_path / "c", config=SMALL, overwrite=True)
    for kind in (torch.nn.BatchNorm1d, Later):
        target = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(2))
        with pytest.raises(MismatchError, match=r"1 missing.*'m\.1\.num_batches_tracked'"):
            sync.load(tmp_path / "c", into={"m": target})


class Later(torch.nn.BatchNorm1d):
    """A batch norm of a later version, which counts batches as the one before."""

    _version = 3


def test_a_dict_of_the_caller_gets_the_versions_of_what_fills_it(tmp_path: Path) -> None:
    """Of another version it has copies: the module makes the new ones of them, in any order."""
    sync.save({"m": torch.nn.Sequential(old(7, 0), current())}, tmp_path / "c", config=SMALL)
    net = torch.nn.Sequential(New(9), New(9))
    state: Any = net.state_dict()
    loaded = sync.load(tmp_path / "c", into={"m": state})["m"]
    assert loaded is state
    assert loaded["1.scale"].data_ptr() == net[1].get_parameter("scale").data_ptr()
    assert values(net[0]) == {"scale": [7.0, 7.0], "shift": [0.0, 0.0]}
    assert [loaded._metadata[name] for name in ("0", "1")] == [{"version": 1}, {"version": 2}]
    net.load_state_dict(loaded)
    assert (values(net[0]), values(net[1])) == (MIGRATED, CURRENT)


@pytest.mark.parametrize(
    "place", [{}, OrderedDict(), None, OrderedDict(current().state_dict())], ids=repr
)
def test_a_placeholder_gets_the_versions_of_what_it_takes(tmp_path: Path, place: Any) -> None:
    """A tracker of the best weights that has none yet, or some that it made by hand."""
    net = current()
    sync.save({"best": Keeper({"net": net.state_dict()})}, tmp_path / "c")
    keeper = Keeper({"net": place})
    sync.load(tmp_path / "c", into={"best": keeper})
    other = current()
    other.load_state_dict(keeper.state["net"])
    assert values(other) == values(net)


def test_a_checkpoint_without_versions_leaves_the_target_its_own(tmp_path: Path) -> None:
    """From torch.distributed.checkpoint, safetensors, or a dict without them."""
    sync.save({"t": {"net": dict(current().state_dict()), "step": 0}}, tmp_path / "c", config=SMALL)
    net = New(9)
    sync.load(tmp_path / "c", into={"t": Trainer(net)})
    assert values(net) == CURRENT


def test_a_dict_of_which_a_part_does_not_fit_gets_no_versions(tmp_path: Path) -> None:
    """What is in it is of one version and of another."""
    sync.save({"net": current().state_dict()}, tmp_path / "c")
    state = OrderedDict(scale=torch.zeros(2), shift=torch.zeros(3))
    sync.load(tmp_path / "c", into={"net": state}, strict="ignore")
    assert state["scale"].tolist() == CURRENT["scale"]
    assert not hasattr(state, "_metadata")


def test_a_parameter_may_have_the_name_of_versions(tmp_path: Path) -> None:
    """Of a module that was saved as a plain dict, whose keys stand for themselves."""
    net = torch.nn.ParameterDict({"m": torch.ones(2)})
    sync.save(dict(net.state_dict()), tmp_path / "c")
    target = torch.nn.ParameterDict({"m": torch.zeros(2)})
    sync.load(tmp_path / "c", into=target)
    assert torch.equal(target["m"], torch.ones(2))


def test_versions_of_other_modules_stay() -> None:
    """A wrapper changes names; those that are not stored are not told to be of no version."""
    saved = with_versions({"a.w": torch.ones(1)}, {"": {"version": 1}, "b": {"version": 5}})
    target = with_versions({"a.w": torch.zeros(1)}, {"": {"version": 1}, "a": {"version": 2}})
    _, result = matched(saved, target)
    assert result._metadata == {"": {"version": 1}, "a": {"version": 2}}


def test_what_modules_say_comes_back_as_it_was() -> None:
    """An OrderedDict of plain values; spectral norm has more than a version."""
    net = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    state = {"m": net.state_dict()}
    _, result = matched(state, None)
    assert_same(result["m"], state["m"])
    assert result["m"]._metadata[""]["spectral_norm"] == {"weight.version": 1}
    assert type(result["m"]._metadata) is OrderedDict


WORDS = {"dtype": torch.int8, "device": torch.device("cuda", 1), "shape": torch.Size((2, 3))}


@pytest.mark.parametrize("is_older", [False, True])
def test_what_modules_say_in_words_of_torch_is_given_to_them(*, is_older: bool) -> None:
    """Element types, devices and sizes are torch's own, and equal to those that it has."""
    saved = with_versions({"w": torch.ones(1)}, {"": {"version": 1, **WORDS}})
    own = {"": {"version": 2 if is_older else 1, **WORDS}}
    match, result = matched(saved, with_versions({"w": torch.zeros(1)}, own))
    assert match.agrees
    found = result._metadata[""]
    assert found == {"version": 1, **WORDS}
    assert {name: type(found[name]) for name in WORDS} == {k: type(v) for k, v in WORDS.items()}


def test_a_part_of_a_module_of_the_same_words_is_loaded() -> None:
    saved, target = (
        with_versions({"a": torch.zeros(1), "b": torch.zeros(1)}, {"": dict(WORDS)})
        for _ in range(2)
    )
    match, _ = matched(saved, target, "a")
    assert match.agrees
    assert [fill.name for fill in match.fills] == ["a"]


@pytest.mark.parametrize(
    "versions", [{"": {"version": torch.ones(1)}}, {"": {"": object()}}, {"": 1}, 7, [1]]
)
def test_versions_that_are_no_plain_values_are_refused(versions: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"cannot save 'm\._metadata"):
        flatten({"m": with_versions({}, versions)})


def test_versions_that_contain_themselves_are_refused() -> None:
    state = with_versions({}, None)
    state._metadata = {"": state}  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeafError, match="_metadata"):
        flatten(state)


@pytest.mark.parametrize(
    "versions",
    [[1], {TAG: "set", "v": []}, {"": {TAG: 0}}, {"": {TAG: "?"}}, {"": "1"}, {"": [1]}],
)
def test_versions_in_a_manifest_are_a_dict(versions: Any) -> None:
    node = {TAG: "odict", "v": {}, "m": versions}
    for target in (None, with_versions({}, {"": {"version": 1}})):
        with pytest.raises(FormatError):
            matched_with(node, target)


def matched_with(node: Any, target: Any) -> Any:
    """Match a target with a node as it stands in a manifest."""
    return Matcher(()).merge("", target, node)(Rebuilder({}))
