"""install(): every removed name is back, nothing that exists is touched, and uninstall leaves no trace."""

import importlib
import importlib.util
import pkgutil
import sys
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer.legacy import install_options, removed_keywords, removed_names, replacements
from shardformer.legacy.install import KEEPS_ITS_MEANING, _lacks, install, installed, uninstall

# pjit and gensym stand in no dict.
IN_NO_DICT = {"jax.core.gensym", "jax.experimental.pjit.pjit"}
CHANGED = set(KEEPS_ITS_MEANING) - IN_NO_DICT
NOT_INSTALLED = ("chex.", "flax.")
OLD_CODE = """
import jax
import multiprocessing
from jax.config import config
from jax.experimental import PartitionSpec as P, maps, optimizers, stax
from jax.experimental.maps import Mesh, ResourceEnv, SerialLoop, mesh, serial_loop, thread_resources, xmap
from jax.experimental.pjit import pjit, with_sharding_constraint
from jax.lib import xla_bridge
from jax.ops import index, index_update
from optax import AdditiveWeightDecayState, GradientTransformation, OptState, additive_weight_decay
import jax.experimental.optimizers as same_optimizers

class ClipByGlobalNormState(OptState):
    "The `clip_by_global_norm` transformation is stateless."

class Counter(OptState):
    count: int

assert jax.experimental.maps.xmap is maps.xmap is xmap
assert same_optimizers is optimizers
assert config is jax.config
assert (ClipByGlobalNormState(), AdditiveWeightDecayState()) == ((), ())
assert jax.tree_leaves(Counter(3)) == [3]
assert jax.tree_multimap(lambda a, b: a + b, {"x": 1}, {"x": 2}) == {"x": 3}
assert xla_bridge.get_backend().platform == "cpu"
assert jax.host_count() == 1 and jax.host_id() == 0 and jax.host_ids() == [0]
assert jax.curry(jax.partial(max, 1))(2)(3) == 3
assert optimizers.sgd(0.1) and stax.Dense(2)
multiprocessing.pool.ThreadPool(1).close()
"""


def run_old_code():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated, and there
        exec(OLD_CODE, {"__name__": "old"})


def contents() -> dict[str, dict[str, object]]:
    libraries = "jax", "numpy", "optax"
    homes = {name for name in sys.modules if name.partition(".")[0] in libraries and "._src" not in name}
    return {home: dict(vars(sys.modules[home])) for home in homes}


@pytest.fixture
def all_imported():
    """Everything that install() imports is imported, so that only what it changes can change."""
    with installed():
        pass


def test_old_code_finds_its_names_while_installed_and_only_then():
    with pytest.raises(ImportError):
        run_old_code()
    with installed():
        run_old_code()
    with pytest.raises(ImportError):
        run_old_code()


def test_every_name_of_the_table_is_there():
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [name for name in removed_names.PROVIDERS if not name.startswith(NOT_INSTALLED)]
        absent = [name for name in names if _lacks(name)]
    assert not absent


def test_uninstall_restores_every_attribute(all_imported):
    before = contents()
    with installed():
        during = contents()
    assert contents() == before
    assert set(during) - set(before) >= set(removed_names.MODULES)
    changed = {
        f"{home}.{name}" for home, kept in before.items() for name in kept if during[home][name] is not kept[name]
    }
    assert {name for name in changed if not name.endswith(".__getattr__")} == CHANGED


def test_a_name_that_exists_is_not_replaced(all_imported, monkeypatch):
    def mine(*_):
        return "mine"

    monkeypatch.setattr(jax, "tree_map", mine, raising=False)
    with installed():
        assert jax.tree_map is mine
        assert jax.tree_leaves is jax.tree_util.tree_leaves
    assert jax.tree_map is mine


def test_a_later_jax_that_drops_today_s_spelling_too(monkeypatch):
    monkeypatch.setitem(removed_names.PROVIDERS, "jax.tree_map", "jax.tree_util:gone")
    with installed() as report:
        assert not hasattr(jax, "tree_map")
        assert hasattr(jax, "tree_leaves")
        assert "jax.tree_* (7)" in report


def test_our_own_mistakes_are_not_hidden(monkeypatch):
    monkeypatch.setitem(removed_names.PROVIDERS, "jax.tree_map", "shardformer.legacy.replacements:gone")
    with pytest.raises(AttributeError, match="gone"):
        install()
    uninstall()
    assert "jax.experimental.maps" not in sys.modules


def test_installing_twice_is_installing_once():
    with installed() as report:
        maps = sys.modules["jax.experimental.maps"]
        assert install() == report
        assert sys.modules["jax.experimental.maps"] is maps
    assert not hasattr(jax, "tree_map")
    uninstall()  # and once too often does no harm


def test_the_report():
    with installed() as report:
        assert report.startswith(f"shardformer.legacy: jax {jax.__version__}, provided ")
        assert "jax.experimental.maps (14), " in report
        assert "jax.tree_* (8), " in report
        assert "\n" not in report
        groups = [int(part.partition(")")[0]) for part in report.split(" (")[1:]]
        assert f"provided {sum(groups)} names" in report
        assert install(strict=True, legacy_random=True) == f"{report}; legacy_random; strict"


def test_options_hold_until_they_are_given_again():
    assert not install_options.strict
    with installed(strict=True):
        assert install_options.strict
        with installed(legacy_random=True):
            assert (install_options.strict, jax.config.jax_threefry_partitionable) == (False, False)
        assert (install_options.strict, jax.config.jax_threefry_partitionable) == (True, True)
        assert hasattr(jax, "tree_map")  # the block inside did not take the names with it
        install()
        assert not install_options.strict
    assert not hasattr(jax, "tree_map")


def test_legacy_random_draws_what_jax_0_4_13_drew():
    def draw(make_key):
        return jax.random.uniform(make_key(42), (3,)).tolist()

    recorded = [0.5741443634033203, 0.1001582145690918, 0.059461116790771484]
    with installed(legacy_random=True):
        assert draw(jax.random.PRNGKey) == recorded
        assert draw(jax.random.key) == recorded
    assert draw(jax.random.key) != recorded


def test_optstate_is_a_base_class_and_still_an_annotation():
    with installed():
        assert type(None) in typing.get_args(optax.OptState | None)
        assert type(None) in typing.get_args(None | optax.OptState)
        assert repr(optax.OptState) == "optax.OptState"
    with pytest.raises(TypeError):
        type("State", (optax.OptState,), {})


def test_the_state_of_a_chain_can_be_assigned_to():
    parameters, gradients = {"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}

    def make():
        return optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: 0.1 * count.astype("float32")))

    today = make()
    with installed():
        then = make()
    state, expected_state = then.init(parameters), today.init(parameters)
    fresh = state[-1]
    for _ in range(2):
        updates, state = then.update(gradients, state, parameters)
        expected, expected_state = today.update(gradients, expected_state, parameters)
    np.testing.assert_array_equal(updates["w"], expected["w"])
    state[-1] = fresh
    updates, _ = then.update(gradients, state, parameters)
    assert not updates["w"].any()  # the schedule began anew
    with pytest.raises(TypeError, match="item assignment"):
        expected_state[-1] = fresh


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (replacements.index_update, [[0, 9, 2], [3, 9, 5]]),
        (replacements.index_add, [[0, 10, 2], [3, 13, 5]]),
        (replacements.index_mul, [[0, 9, 2], [3, 36, 5]]),
        (replacements.index_min, [[0, 1, 2], [3, 4, 5]]),
        (replacements.index_max, [[0, 9, 2], [3, 9, 5]]),
    ],
)
def test_indexed_updates(function, expected):
    x = np.arange(6).reshape(2, 3)
    with installed():
        index = jax.ops.index[:, 1]
    assert function(x, index, 9).tolist() == expected
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_shuffle_equals_an_independent_permutation_of_0_4_13():
    with installed(legacy_random=True):
        assert replacements.shuffle(jax.random.PRNGKey(1), jnp.arange(6).reshape(3, 2)).tolist() == [
            [0, 1],
            [2, 5],
            [4, 3],
        ]


def test_small_functions():
    with installed():
        assert jnp.msort(jnp.array([[3, 1], [2, 4]])).tolist() == [[2, 1], [3, 4]]
        assert jax.lax.tie_in(1, 2) == 2
        assert -np.inf == jnp.NINF
        assert jax.random.default_prng_impl().key_shape == jax.random.PRNGKey(0).shape
        with jax.default_prng_impl("rbg"):
            assert jax.random.default_prng_impl().key_shape == jax.random.PRNGKey(0).shape == (4,)
        assert jax.lax.zeros_like_array(np.ones(2)).tolist() == [0, 0]
        assert jax.interpreters.xla.abstractify(np.ones((2, 3), "float32")) == jax.core.ShapedArray((2, 3), "float32")
        assert jax.core.ConcretizationTypeError is jax.errors.ConcretizationTypeError
        with jax.experimental.enable_x64():
            assert jnp.arange(2.0).dtype == "float64"
            with jax.experimental.disable_x64():
                assert jnp.arange(2.0).dtype == "float32"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a name may be on its way out of NumPy, such as chararray
def test_the_table_says_what_to_write_today():
    tables = removed_names.RENAMED, removed_names.REWRITTEN, removed_names.NOT_COVERED
    everything = [name for table in tables for name in table]
    assert len(everything) == len(set(everything))
    assert all(removed_names.today(name) for name in everything)
    for name, provider in removed_names.RENAMED.items():
        if not name.startswith(NOT_INSTALLED):
            pkgutil.resolve_name(provider)


def test_a_removed_option_warns_once_and_leaves_with_the_names():
    with installed():
        assert jax.config.jax_spmd_mode == jax.config.read("jax_spmd_mode") == "allow_jit"
        with pytest.warns(UserWarning, match="jax.config has no option jax_spmd_mode any more") as told:
            jax.config.update("jax_spmd_mode", "allow_all")
        jax.config.FLAGS.jax_spmd_mode = "allow_all"
        assert [warning.filename for warning in told] == [__file__]
        assert jax.config.FLAGS.jax_spmd_mode == "allow_all"
    with pytest.raises(AttributeError, match="jax_spmd_mode"):
        jax.config.update("jax_spmd_mode", "allow_all")
    assert not hasattr(jax.config, "FLAGS")
    assert "update" not in vars(jax.config)


def test_what_can_be_imported_and_not_used_says_what_to_write():
    with installed():
        from jax.experimental.maps import xmap_p
        from jax.experimental.pjit import AUTO, pjit

        with pytest.raises(NotImplementedError, match=r"xmap_p left with jax's own xmap: .* call xmap itself"):
            xmap_p.bind(1)
        assert pjit(lambda x: x + 1, in_axis_resources=AUTO, out_axis_resources=AUTO)(jnp.ones(2)).tolist() == [2, 2]


def test_members_of_arrays_leave_with_the_names():
    array = type(jnp.zeros(()))
    before = {name: vars(array).get(name) for name in ("device", "device_buffer", "device_buffers", "local_data")}
    with installed():
        assert jnp.ones(2).device_buffer.tolist() == jnp.ones(2).local_data().tolist() == [1, 1]
    assert {name: vars(array).get(name) for name in before} == before


def test_every_removed_keyword_is_put_back():
    assert set(removed_keywords.REMOVED_KEYWORDS) <= set(removed_names.CHANGED) | set(removed_names.PROVIDERS)


@pytest.mark.parametrize(
    ("statement", "name", "kind"),
    [
        ("from jax import mask", "jax.mask", ImportError),
        ("from jax.experimental import general_map", "jax.experimental.general_map", ImportError),
        ("from jax.core import unitvar", "jax.core.unitvar", ImportError),
        ("import jax.lax_reference", "jax.lax_reference", ModuleNotFoundError),
        ("from jax.lax_reference import add", "jax.lax_reference", ModuleNotFoundError),
        ("import jax\njax.mask", "jax.mask", AttributeError),
        ("import jax\njax.lib.xla_client.ops", "jax.lib.xla_client.ops", AttributeError),  # jaxlib.xla_client today
    ],
)
def test_error_about_a_removed_name_is_the_advice(statement, name, kind):
    with installed(), pytest.raises(kind) as error:
        exec(statement, {})
    assert type(error.value) is kind
    assert str(error.value).startswith(f"{name} was removed, ")
    assert str(error.value).endswith(f"write {removed_names.today(name)}")


def test_probing_for_a_removed_name_stays_possible():
    with installed():
        assert not hasattr(jax, "mask")
        assert importlib.util.find_spec("jax.lax_reference") is None
        with pytest.raises(AttributeError, match="no_such_name"):
            jax.core.no_such_name  # noqa: B018


def test_members_that_arrays_had_are_back():
    with installed():
        assert isinstance(jnp.ones(2).to_py(), np.ndarray)
        assert jnp.ones(2).block_host_until_ready().tolist() == [1, 1]
        assert jax.random.key(3).unsafe_raw_array().tolist() == [0, 3]


def test_arrays_split_and_broadcast_also_while_traced():
    def last_third(x):
        return x.split(3, axis=-1)[2].broadcast((2,)).broadcast_in_dim((2, 1, 2), (0, 2))

    with installed():
        x = jnp.arange(6)
        assert last_third(x).tolist() == jax.jit(last_third)(x).tolist() == [[[4, 5]], [[4, 5]]]
    assert not hasattr(x, "split")
