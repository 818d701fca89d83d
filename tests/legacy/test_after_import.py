"""The names of haiku and optax come back when a program imports the library, and not before."""

import sys

import jax
import jax.numpy as jnp
import pytest

from shardformer.legacy.install import installed

OLD_HAIKU = "import jax\nassert jax.tree_structure, 'haiku 0.0.9 uses it as it is imported'\n"


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder that Python searches first, with haiku and optax not imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("haiku", "optax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("haiku", "optax")]:
        del sys.modules[name]  # monkeypatch puts the real ones back


@pytest.fixture
def old_haiku(libraries):
    (libraries / "haiku").mkdir()
    (libraries / "haiku" / "__init__.py").write_text(OLD_HAIKU + "from haiku import experimental\n")
    (libraries / "haiku" / "experimental.py").write_text("")


def test_an_old_haiku_finds_its_names_and_has_named_call(old_haiku):
    with installed() as report:
        assert "haiku" not in report
        import haiku

        assert haiku.experimental.named_call is jax.named_call
        with pytest.raises(AttributeError, match=r"write jax\.jit around"):
            haiku.jit  # noqa: B018
    assert not hasattr(haiku.experimental, "named_call")


def test_an_old_haiku_fails_without_install(old_haiku):
    with pytest.raises(AttributeError, match="tree_structure"):
        import haiku  # noqa: F401


def test_install_imports_neither_haiku_nor_optax(libraries):
    for name in ("haiku", "optax"):
        (libraries / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    with installed():
        from jax.experimental import optix
    with pytest.raises(RuntimeError, match="imported"):
        optix.adam  # noqa: B018


def test_chex_has_its_old_assertions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "chex", raising=False)
    (tmp_path / "chex.py").write_text("def assert_trees_all_close(*trees): return trees\n")
    with installed():
        import chex

        assert chex.assert_tree_all_close is chex.assert_trees_all_close
        assert not hasattr(chex, "assert_tree_all_equal_shapes")  # today's name is gone too
    assert not hasattr(sys.modules.pop("chex"), "assert_tree_all_close")


def test_the_stack_of_traces_tells_transformations_apart():
    def level():
        running = jax.core.thread_local_state.trace_state.trace_stack.stack
        return running[0].trace_type, running[-1].level, jax.core.cur_sublevel()

    levels = []

    def note(x):
        levels.append(level())
        return x

    with installed():
        outside = level()
        assert level() == outside
        jax.eval_shape(note, 1.0)
        jax.eval_shape(jax.vmap(note), jnp.ones(1))
    assert outside not in levels
    assert levels[0] != levels[1]


def test_xe_has_the_types_of_compiled_functions():
    with installed():
        xe = jax.interpreters.xla.xe
        from jaxlib.xla_extension import Device, PjitFunction

        assert isinstance(jax.jit(identity), xe.PjitFunction)
        assert isinstance(jax.pmap(identity), xe.PmapFunction)
        assert not isinstance(identity, (xe.CompiledFunction, xe.PmapFunction))
        assert not isinstance(jax.jit(identity), xe.PmapFunction)
        assert (Device, PjitFunction) == (jax.Device, xe.CompiledFunction)
    assert not hasattr(jax.interpreters.xla, "xe")
    assert "jaxlib.xla_extension" not in sys.modules


def identity(x):
    return x


def test_arrays_are_whole_whatever_haiku_sets():
    from_old_haiku = "maps._positional_semantics.val = maps._PositionalSemantics.GLOBAL"
    with installed():
        exec(f"from jax.experimental import maps\n{from_old_haiku}", {})
    with pytest.raises(ImportError):
        exec("from jax.experimental import maps", {})


def test_old_keys_are_allowed_while_installed():
    jax.config.update("jax_legacy_prng_key", "error")
    try:
        with installed():
            assert jax.random.split(jax.random.PRNGKey(0)).shape == (2, 2)
        with pytest.raises(ValueError, match="Legacy uint32 key"):
            jax.random.split(jax.random.PRNGKey(0))
    finally:
        jax.config.update("jax_legacy_prng_key", "allow")
