"""Match objects that give their state as a template and take what is stored, as a whole.

The class that extends this one (`target.Matcher`) matches what such a template holds.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.encode import join_fqn
from ckptio.state.elsewhere import Elsewhere
from ckptio.state.handed import handed_to, takes_unasked
from ckptio.state.numbered import numbered
from ckptio.state.optimizer_blocks import with_blocks
from ckptio.state.optimizers import optimizer_differs, require_parameters, template_of
from ckptio.state.parts import put_back
from ckptio.state.places import before_taking
from ckptio.state.take import take_state
from ckptio.state.tensors import TensorMatcher
from ckptio.state.tree import is_kept
from ckptio.state.untouched import Untouched, runs_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.format.encode import Json
    from ckptio.state.rebuild import Rebuilder

    Assemble = Callable[[Rebuilder], Any]


class ObjectMatcher(TensorMatcher, abc.ABC):
    """Matches stateful objects.

    Attributes:
        untouched: Sees whether code of one of them writes to what another one is about to take.
        runs_foreign: Whether one has code that may.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.untouched = Untouched()
        self._elsewhere = Elsewhere(self.match.fills, self._keep, self.untouched.changed)
        self.runs_foreign = False

    @abc.abstractmethod
    def _dict(
        self, fqn: str, target: dict[Any, Any], node: Json, *, closed: bool, flat: bool = False
    ) -> Assemble:
        """Match a dict."""

    @abc.abstractmethod
    def _value(self, fqn: str, target: Any, node: Json, own: Sequence[type] = ()) -> Assemble:
        """Take whatever the checkpoint has."""

    def _stateful(self, fqn: str, target: Any, node: Json) -> Assemble:
        if self._takes_nothing(fqn, target, node):
            return lambda _: target
        stored = node
        is_optimizer = isinstance(target, torch.optim.Optimizer) and type(node) is dict
        if is_optimizer:
            require_parameters(fqn, target)
            node = numbered(node)
            found = optimizer_differs(fqn, target, node, self._tensors, self._keep)
            if found:
                self.match.mismatched.append(f"{fqn or 'the whole state'}: {found}")
                return lambda _: target
        self._elsewhere.note(fqn, target, stored)
        self.runs_foreign |= runs_foreign(target)
        is_module = isinstance(target, torch.nn.Module)
        if self._hands_over and is_kept(fqn, node, self._keep) and takes_unasked(target, node):
            return self._handed_over(fqn, target, node)
        num_blanks, start = self._num_blanks, len(self.match.fills)
        template = template_of(fqn, target, node, self._tensors, self._keep)
        self.match.num_before, num_left = len(self.match.fills), self.match.num_left
        handed = None
        if isinstance(template, dict):
            if is_optimizer:
                template = with_blocks(fqn, target, template, node, self._tensors, self._keep)
            before, self._handed = self._handed, handed_to(fqn, target, template)
            handed = self._handed
            assemble = self._dict(fqn, template, node, closed=is_module, flat=is_module)
            self._handed = before  # of an object around this one, if there is one
        else:  # it has nothing yet, or something of its own
            assemble = self._value(fqn, None, node)
        is_partial = self._keep is not None or self.match.num_left > num_left
        if is_module:
            self.match.modules[fqn] = target
            named = {join_fqn(fqn, key): value for key, value in template.items()}
            self.match.forgive_tied(named, self._keep)
        has_blanks, stop = self._num_blanks > num_blanks, len(self.match.fills)

        def hand_over(rebuilder: Rebuilder) -> Any:
            values = assemble(rebuilder)
            if handed is not None and is_partial:
                values = handed.without_own(values, template)
            self.untouched.check_before(start, stop)
            self.untouched.check_state(values)
            before = before_taking(fqn, target, values, template)
            given, own = values if before.held else {}, range(start, stop)
            beside = self._elsewhere.beside(fqn, given, stored, own, rebuilder.tensors)
            with self.untouched.guard(target):
                rebuilder.notes += take_state(fqn, target, values, assigns=is_module and has_blanks)
            guard = self.untouched.guard
            rebuilder.notes += put_back(before, beside, guard, is_partial=is_partial)
            return target

        return hand_over

    def _takes_nothing(self, fqn: str, target: Any, node: Json) -> bool:
        """Whether an object stays as it is; notes what that leaves out."""
        if self._selects(fqn, node):
            return self._is_taken(fqn, target, node)
        self.match.missing += self._members_kept(fqn, target)
        return True

    def _handed_over(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Give a stateful object what is stored, and nothing of its own."""
        assemble, start = self._take(fqn, node), len(self.match.fills)

        def hand_over(rebuilder: Rebuilder) -> Any:
            self.untouched.check_before(start, start)
            values = assemble(rebuilder)
            before = before_taking(fqn, target, values)
            given, own = values if before.held else {}, range(start, start)
            beside = self._elsewhere.beside(fqn, given, node, own, rebuilder.tensors)
            rebuilder.notes += take_state(fqn, target, values, assigns=False)
            guard = self.untouched.guard
            rebuilder.notes += put_back(before, beside, guard, is_partial=False)
            return target

        return hand_over
