"""optax as GPT-J used it: a base class for states, and a chain whose state is a list, so that it can be assigned to."""

import types
import typing

import optax

_optax_chain, _OptaxState = optax.chain, optax.OptState  # before `install()` puts ours in their places


class _OptState:
    """NamedTuple as a base class, as in old optax; today's union of types in an annotation."""

    def __mro_entries__(self, bases):
        return types.resolve_bases((typing.NamedTuple,))

    def __or__(self, other):
        return typing.Union[_OptaxState, other]  # noqa: UP007  # today's OptState may be no class

    def __ror__(self, other):
        return typing.Union[other, _OptaxState]  # noqa: UP007

    def __repr__(self):
        return "optax.OptState"


OptState = _OptState()


def chain(*transformations: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optax.chain` with its states in a list: fine-tuning code assigns `opt_state[-1]`, which a tuple forbids."""
    modern = _optax_chain(*transformations)

    def init(params):
        return list(modern.init(params))

    def update(updates, state, params=None, **extra):
        updates, state = modern.update(updates, tuple(state), params, **extra)
        return updates, list(state)

    return type(modern)(init, update)
