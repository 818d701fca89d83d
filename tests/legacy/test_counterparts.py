"""install(): removed names that come back over a living counterpart do what they did."""

import warnings

import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.legacy.install import installed
from shardformer.legacy.removed_uses import find_removed_uses


def test_linear_util_wraps_functions_without_debug_info():
    with installed():
        from jax import linear_util as lu

        @lu.transformation
        def doubled(x):
            result = yield (x,), {}
            yield 2 * result

        assert doubled(lu.wrap_init(lambda x: x + 1)).call_wrapped(3) == 8


def test_api_util_and_core_names_come_back():
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated, and there
        from jax.api import grad
        from jax.core import concrete_or_error, gensym, get_aval, is_constant_dim  # noqa: F401
        from jax.experimental.x64_context import enable_x64
        from jax.util import safe_map, safe_zip, split_list, unzip2

        assert grad is jax.grad
        assert get_aval(np.ones(2, "float32")).shape == (2,)
        assert [is_constant_dim(d) for d in (3, *jax.export.symbolic_shape("n"))] == [True, False]
        assert safe_map(max, [1, 5], [3, 2]) == [3, 5]
        assert unzip2([(1, 2), (3, 4)]) == ((1, 3), (2, 4))
        assert split_list([1, 2, 3, 4], [1, 2]) == [[1], [2, 3], [4]]
        with pytest.raises(ValueError, match="lengths"):
            safe_zip([1], [1, 2])
        with enable_x64():
            assert jnp.arange(2.0).dtype == "float64"


def test_axis_frame_has_the_size_and_raises_without_the_axis():
    with installed():
        from jax.core import axis_frame

        sizes = jax.vmap(lambda x: x * axis_frame("i").size, axis_name="i")(jnp.ones(3))
        assert sizes.tolist() == [3, 3, 3]
        with pytest.raises(NameError, match="j"):
            axis_frame("j")


def test_gensym_makes_different_variables_of_an_abstract_value():
    with installed():
        from jax.core import ShapedArray, gensym, source_info_util

        new = gensym([], "_tag")
        first, second = new(ShapedArray((2,), "float32")), new(ShapedArray((2,), "float32"))
        assert first.aval.shape == (2,)
        assert first != second
        assert source_info_util.current() is not None


def test_linearize_of_ad_returns_the_linear_jaxpr():
    with installed():
        from jax import linear_util as lu
        from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
        from jax.interpreters.ad import linearize

        x, y = jnp.arange(3.0), jnp.ones(3)
        function = lu.wrap_init(lambda x, y: [jnp.sin(x) * y, jnp.ones(2), x @ y])
        results, pvals, jaxpr, consts = linearize(function, x, y, has_aux=False)
        assert results[2] == 3
        assert [pval.is_known() for pval in pvals] == [False, True, False]
        tangents = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(y, 0 * y)
        np.testing.assert_allclose(tangents[0], jnp.cos(x), rtol=1e-6)
        assert tangents[1] == 3
        assert not any(equation.primitive.map_primitive for equation in jaxpr.eqns)


def test_zeros_like_is_a_primitive():
    with installed():
        from jax.interpreters.ad import reducing_transposes, zeros_like_jaxval, zeros_like_p

        gradient = jax.jit(jax.vmap(jax.grad(lambda x: zeros_like_p.bind(x) + 2 * x)))(jnp.ones(3))
        assert gradient.tolist() == [2, 2, 2]
        assert zeros_like_jaxval(jnp.ones(2)).tolist() == [0, 0]
        assert zeros_like_p not in reducing_transposes
        assert jax.ad.zeros_like_p is zeros_like_p


def test_ad_has_the_modules_that_it_imported():
    with installed():
        from jax.interpreters.ad import config, source_info_util

        assert config.jax_enable_checks == jax.config.jax_enable_checks
        assert source_info_util.current_name_stack() is not None


def test_abstract_values_are_joined():
    with installed():
        from jax.core import DShapedArray, ShapedArray, lattice_join

        weak = ShapedArray((2,), "float32", weak_type=True)
        assert not lattice_join(weak, ShapedArray((2,), "float32")).weak_type
        assert lattice_join(None, weak) is weak
        assert type(weak) is not DShapedArray
        with pytest.raises(TypeError):
            lattice_join(weak, ShapedArray((3,), "float32"))


def test_sums_of_windows_come_back():
    with installed():
        sums = jax.lax._reduce_window_sum(jnp.arange(4.0), (2,), (1,), [(0, 1)])
    assert sums.tolist() == [1, 3, 5, 3]


def test_traces_tell_what_runs():
    texts = []

    def note(x):
        texts.append((str(jax.core.thread_local_state.trace_state.trace_stack), isinstance(x, BatchTracer)))
        return x

    with installed():
        from jax.interpreters.batching import BatchTracer

        note(jnp.ones(2)), jax.jit(note)(1.0), jax.vmap(note)(jnp.ones(2)), jax.jit(jax.vmap(note))(jnp.ones(2))
    kinds = [(f"{'DynamicJaxprTrace' in text:d}{'BatchTrace' in text:d}", batched) for text, batched in texts]
    assert kinds == [("00", False), ("10", False), ("01", True), ("11", True)]


def test_old_and_new_names_of_jax_ad_are_kept_apart():
    new = getattr(jax, "ad", None)  # since jax 0.10, with other names
    with installed():
        assert issubclass(jax.ad.JVPTracer, jax.core.Tracer)
        assert (jax.ad if new else None) is new
    assert not hasattr(new, "JVPTracer")
    uses = find_removed_uses("import jax\njax.ad.JVPTracer\njax.ad.no_such\njax.ad.GradRef\n")
    expected = [("jax.ad.JVPTracer", "covered"), ("jax.ad", "not covered")]
    assert [(use.name, use.status) for use in uses][:2] == expected
    assert len(uses) == (2 if new else 3)


def test_where_takes_its_old_keywords():
    with installed():
        assert jnp.where(jnp.array([True, False]), x=1, y=2).tolist() == [1, 2]
        assert jnp.where(condition=jnp.array([True, False]), y=2, x=1).tolist() == [1, 2]
        assert jnp.where(jnp.array([False, True]))[0].tolist() == [1]
    with pytest.raises(TypeError, match="keyword"):
        jnp.where(jnp.array([True, False]), x=1, y=2)


def test_translation_rules_lower_a_primitive():
    with installed():
        from jax.core import Primitive
        from jax.interpreters import batching, xla

        second, doubled = Primitive("second"), Primitive("doubled")
        for primitive in (second, doubled):
            primitive.def_abstract_eval(lambda *operands, **_: operands[0])
        assert batching.not_mapped is None
        platforms = []

        def take_second(context: xla.TranslationContext, avals_in, avals_out, *operands: xla.XlaOp, index):
            platforms.append(context.platform)
            return [operands[index]]

        xla.register_translation(second, take_second)
        xla.register_translation(doubled, xla.lower_fun(lambda x: 2 * x, multiple_results=False, new_style=True))
        assert jax.jit(lambda x, y: second.bind(x, y, index=1))(1.0, 5.0) == 5.0
        assert platforms == ["cpu"]
        assert jax.jit(doubled.bind)(4.0) == 8.0


@pytest.mark.filterwarnings("ignore:jax.core.pytype_aval_mappings:DeprecationWarning")
def test_xla_has_the_abstract_values_of_types():
    with installed():
        mappings = jax.interpreters.xla.pytype_aval_mappings
        assert mappings is jax.core.pytype_aval_mappings
        assert np.ndarray in mappings


def test_core_has_linear_util():
    with installed():
        assert float(jax.core.lu.wrap_init(jnp.sin).call_wrapped(0.0)) == 0.0


def test_translation_rule_that_builds_operations_gets_the_advice():
    with installed():
        from jax.core import Primitive
        from jax.interpreters import xla

        built = Primitive("built")
        built.def_abstract_eval(lambda x: x)
        xla.register_translation(built, lambda context, avals_in, avals_out, x: [context.builder.add(x, x)])
        with pytest.raises(NotImplementedError, match=r"no XlaBuilder any more.*register_lowering"):
            jax.jit(built.bind)(1.0)


def test_xla_computation_gives_the_hlo():
    with installed():
        computation, shape = jax.xla_computation(lambda x: jnp.sin(x) * 2, return_shape=True)(np.ones(3, "float32"))
        assert "sine" in computation.as_hlo_text()
        assert shape.shape == (3,)
        with pytest.raises(NotImplementedError, match="takes no axis_env"):
            jax.xla_computation(jnp.sin, axis_env=[("i", 2)])


def test_spherical_harmonics_take_their_old_arguments():
    """The expected value is scipy.special.sph_harm(1, 2, 0.5, 0.3) of scipy 1.11."""
    with installed(), jax.numpy_dtype_promotion("standard"):
        got = jax.scipy.special.sph_harm(np.array([1]), np.array([2]), np.array([0.5]), np.array([0.3]), n_max=2)
    np.testing.assert_allclose(got, [-0.19140674 - 0.10456598j], rtol=1e-5)


def test_random_keys_by_their_implementation():
    with installed():
        assert jax.random.rbg_key(1).tolist() == jax.random.PRNGKey(1, impl="rbg").tolist()
        assert jax.random.threefry2x32_key(1).tolist() == [0, 1]


def test_pmap_sharding_is_a_named_sharding():
    with installed():
        from jax.sharding import PmapSharding

        devices = jax.devices()[:4]
        default = PmapSharding.default((4, 3), 0, devices)
        array = jax.device_put(np.arange(12).reshape(4, 3), default)
        assert [shard.data.tolist() for shard in array.addressable_shards][1] == [[3, 4, 5]]
        with pytest.raises(ValueError, match="one device for each index"):
            PmapSharding.default((3, 3), 0, devices)


def test_arrays_over_devices_have_the_default_pmap_sharding():
    with installed():
        devices = jax.devices()[:4]
        shards = jax.device_put_sharded([jnp.full(2, i) for i in range(4)], devices)
        copies = jax.device_put_replicated(jnp.arange(2), devices)
        default = jax.sharding.PmapSharding.default((4, 2), 0, devices)
        assert shards.sharding == copies.sharding == default
        assert shards.sharding != jax.sharding.PmapSharding.default((2, 4), 1, devices)


def test_removed_libraries_modules_have_their_names():
    with installed():
        from jax.lib import xla_client, xla_extension

        assert xla_client.XlaRuntimeError is jax.errors.JaxRuntimeError
        assert isinstance(jax.devices()[0], xla_extension.Device)


def test_gda_serialization_reads_what_it_wrote(tmp_path):
    pytest.importorskip("tensorstore")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    written = jax.device_put(np.arange(8.0, dtype=np.float32), jax.sharding.NamedSharding(mesh, spec))
    with installed():
        from jax.experimental.gda_serialization import serialization

        paths = [serialization.get_tensorstore_spec(str(tmp_path / "array"))]
        serialization.run_serialization([written], paths)
        for place in (([written.sharding],), ([mesh], [spec])):
            (read,) = serialization.run_deserialization(*place, paths)
            assert read.sharding == written.sharding
            np.testing.assert_array_equal(read, written)
        assert not hasattr(serialization, "no_such_name")


def test_names_of_other_homes_come_back():
    with installed():
        from jax.lib import xla_client, xla_extension

        assert xla_extension.DeviceArray is jax.Array
        assert isinstance(jax.tree.structure(0), xla_extension.PyTreeDef)
        assert xla_client.FftType.FFT == jax.lax.FftType.FFT
        assert haiku.experimental.named_call(abs)(-1) == 1
