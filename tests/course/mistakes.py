"""Mistakes as learners write them: what fills the holes of a lesson, and the words that the checker must say.

None of these programs is taken from the lessons' own lists of mistakes. Several fill a hole in another way than these
do, or with two mistakes of the same kind.
"""

# {lesson: [(the sources of its holes in turn, a part of the checker's sentence)]}
MISTAKES: dict[int, list[tuple[tuple[str, ...], str]]] = {
    1: [
        (('return lax.psum(part, "mp")', 'return (lax.psum(gradient_of_sum, "mp"),)'), "to a second psum"),
        (("return part", "return (gradient_of_sum,)"), "A psum over mp is missing"),
        (('return lax.pmean(part, "mp")', "return (gradient_of_sum,)"), "mp = 4 times too small"),
        (('return lax.psum(part, "mp")', 'return (gradient_of_sum / lax.axis_size("mp"),)'), "return it unchanged"),
        (('return lax.psum(part, "dp")', "return (gradient_of_sum,)"), "split over mp: sum over mp"),
        (('return lax.psum(part, ("dp", "mp"))', "return (gradient_of_sum,)"), "`loss` is dp = 2 times too large"),
        (('return lax.psum(part, "mp")', "return (0 * gradient_of_sum,)"), "`gradient` is zero on every device"),
        (('return lax.psum(part, "mp")', "return gradient_of_sum"), "Return a tuple with one entry"),
    ],
    2: [
        (("y = jax.nn.gelu(x @ up) @ down",), "A psum over mp is missing"),
        (('y = lax.pmean(jax.nn.gelu(x @ up) @ down, "mp")',), "mp = 4 times too small"),
        (('h = lax.psum(jnp.matmul(x, up), "mp")\ny = lax.psum(jax.nn.gelu(h) @ down, "mp")',), "before the gelu"),
        (('y = lax.psum(jax.nn.gelu(x @ up) @ down, "dp")',), "summed over dp"),
        (('y = lax.psum(jax.nn.gelu(x @ up) @ down, ("mp", "dp"))',), "summed over dp too"),
        (('y = lax.psum(lax.psum(jax.nn.gelu(x @ up) @ down, "mp"), "mp")',), "mp = 4 times too large"),
        (('y = lax.psum(x @ up @ down, "mp")',), "gelu between the two products is missing"),
        (("y = jax.nn.gelu(x @ up)",), "has shape [4, 4] on each device; expected the block [4, 6]"),
    ],
    3: [
        (('y = x + lax.psum(hidden @ down + bias, "mp")',), "`y` holds `bias` 4 times"),
        (('y = lax.psum(x + hidden @ down, "mp") + bias',), "`y` holds `x` 4 times"),
        (('y = lax.psum(hidden @ down, "mp") + bias',), "`y` lacks `x`"),
        (('y = x + lax.psum(hidden @ down, "mp")',), "`y` lacks `bias`"),
        (("y = hidden @ down + x + bias",), "The psum over mp is missing"),
        (('y = x + bias + lax.pmean(hidden @ down, "mp")',), "averaged"),
        (('y = lax.psum(hidden @ down + x + bias, "mp")',), "both count mp times"),
        (('y = x + lax.psum(hidden @ down, ("dp", "mp")) + bias',), "Sum over mp only"),
    ],
    4: [
        (('vectors = lax.psum(table[tokens], "mp")',), "as if it were the table"),
        (
            ('n = table.shape[0]\nlocal = tokens - n * lax.axis_index("mp")\nhere = (local >= 0) & (local < n)\n'
             "vectors = jnp.where(here[:, None], table[local], 0)",),
            "A psum over mp is missing",
        ),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("mp")\n'
             'vectors = lax.psum(jnp.take(table, local, axis=0, mode="clip"), "mp")',),
            "not masked",
        ),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("mp")\nhere = (local >= 0) & (local <= n)\n'
             'vectors = lax.psum(here[:, None] * table[local], "mp")',),
            "one row too many",
        ),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("mp")\nhere = (0 < local) & (local < n)\n'
             'vectors = lax.psum(here[:, None] * table[local], "mp")',),
            "leaves out the first row",
        ),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("dp")\nhere = (0 <= local) & (local < n)\n'
             'vectors = lax.psum(here[:, None] * table[local], "mp")',),
            "position along dp",
        ),
        (('full = lax.all_gather(table, "mp", tiled=True)\nvectors = full[tokens]',), "the numbers are right, but"),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("mp")\nmine = (local >= 0) & (local < n)\n'
             'vectors = lax.psum(jnp.where(mine, table[local], 0), "mp")',),
            "lacks a mask [:, None]",
        ),
        (
            ('n = len(table)\nlocal = tokens - n * lax.axis_index("mp")\nmine = (local >= 0) & (local < n)\n'
             'vectors = lax.psum(jnp.where(mine[:, None], table[tokens], 0), "mp")',),
            "subtract the first row of this device from the index too",
        ),
    ],
    5: [
        (
            ('full = lax.all_gather(logits, "mp", axis=1, tiled=True)\n'
             "losses = jax.nn.logsumexp(full, 1) - jnp.take_along_axis(full, targets[:, None], 1)[:, 0]",),
            "the numbers are right, but each device sends",
        ),
        (
            ('n = logits.shape[1]\nhot = jax.nn.one_hot(targets - n * lax.axis_index("mp"), n)\n'
             "losses = jax.nn.logsumexp(logits, 1) - (hot * logits).sum(1)",),
            "Nothing was added over mp",
        ),
        (
            ('n = logits.shape[1]\nhot = jax.nn.one_hot(targets - n * lax.axis_index("mp"), n)\n'
             'total = lax.psum(jnp.exp(logits).sum(1), "mp")\n'
             'losses = jnp.log(total) - lax.psum((hot * logits).sum(1), "mp")',),
            "exponentials overflow",
        ),
        (
            ('n = logits.shape[1]\nhot = jax.nn.one_hot(targets - n * lax.axis_index("mp"), n)\n'
             'm = lax.pmax(logits.max(1), "mp")\ntotal = lax.psum(jnp.exp(logits - m[:, None]).sum(1), "mp")\n'
             "losses = jnp.log(total) + m - (hot * logits).sum(1)",),
            "known only to the device that holds",
        ),
        (
            ('n = logits.shape[1]\nhot = jax.nn.one_hot(targets - n * lax.axis_index("mp"), n)\n'
             'm = lax.pmax(logits.max(1), "mp")\ntotal = lax.psum(jnp.exp(logits - m[:, None]).sum(1), "mp")\n'
             'losses = jnp.log(total) - lax.psum((hot * logits).sum(1), "mp")',),
            "not added again",
        ),
        (
            ('n = logits.shape[1]\nhot = jax.nn.one_hot(targets, n)\n'
             'm = lax.pmax(logits.max(1), "mp")\ntotal = lax.psum(jnp.exp(logits - m[:, None]).sum(1), "mp")\n'
             'losses = jnp.log(total) + m - lax.psum((hot * logits).sum(1), "mp")',),
            "began at token 0",
        ),
        (
            ('m = lax.pmax(logits.max(axis=1), "mp")\n'
             'total = lax.psum(jnp.exp(logits - m[:, None]).sum(axis=1), "mp")\n'
             'right = lax.psum(jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0], "mp")\n'
             "losses = jnp.log(total) + m - right",),
            "take_along_axis gives NaN",
        ),
    ],
    6: [
        (("masks = jax.random.bernoulli(key, KEEP, (rows, columns))",), "all blocks drop the same places"),
        (
            ('masks = jax.vmap(lambda r: draw_mask(key, r))(jnp.arange(rows))[:, :columns]',),
            "drew the same mask",
        ),
        (
            ('first = rows * lax.axis_index("dp")\n'
             "masks = jax.vmap(lambda r: draw_mask(key, first + r))(jnp.arange(rows))[:, :columns]",),
            "slice the columns of this device",
        ),
        (
            ('full = jax.vmap(lambda r: draw_mask(key, r))(jnp.arange(rows))\n'
             'masks = lax.dynamic_slice_in_dim(full, columns * lax.axis_index("mp"), columns, axis=1)',),
            "numbered from 0 on every device",
        ),
        (
            ('folded = jax.random.fold_in(key, lax.axis_index("mp"))\nfirst = rows * lax.axis_index("dp")\n'
             "full = jax.vmap(lambda r: draw_mask(folded, first + r))(jnp.arange(rows))\n"
             'masks = lax.dynamic_slice_in_dim(full, columns * lax.axis_index("mp"), columns, axis=1)',),
            "folded into the key",
        ),
        (
            ('first = lax.axis_index("dp")\nfull = jax.vmap(lambda r: draw_mask(key, first + r))(jnp.arange(rows))\n'
             'masks = lax.dynamic_slice_in_dim(full, columns * lax.axis_index("mp"), columns, axis=1)',),
            "multiply it by the rows",
        ),
        (
            ('key = jax.random.fold_in(key, lax.axis_index("mp"))\nfirst = rows * lax.axis_index("dp")\n'
             "masks = jax.vmap(lambda r: draw_mask(key, first + r))(jnp.arange(rows))[:, :columns]",),
            "Use `key` as it is",
        ),
        (
            ('first = rows * lax.axis_index("dp")\n'
             "masks = jax.vmap(lambda r: draw_mask(key, first + r))(jnp.arange(rows))",),
            "slice those of this device",
        ),
    ],
    7: [
        (
            ("total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)\n"
             'loss = lax.pmean(total / weights.sum(), "dp")\ngradient = lax.pmean(gradient / weights.sum(), "dp")',),
            "mean of means",
        ),
        (
            ("total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)\n"
             'count = lax.psum(weights.sum(), "dp")\n'
             'loss = lax.psum(total, "dp") / count\ngradient = gradient / count',),
            "a psum over dp is missing",
        ),
        (
            ("loss, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)",),
            "the sums of this device's rows",
        ),
        (
            ("total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)\n"
             'n = lax.psum(len(y), "dp")\nloss, gradient = lax.psum(total, "dp") / n, lax.psum(gradient, "dp") / n',),
            "the number of all rows",
        ),
        (
            ("total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)\n"
             'n = weights.sum()\nloss, gradient = lax.psum(total, "dp") / n, lax.psum(gradient, "dp") / n',),
            "of this device only",
        ),
        (
            ("total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)\n"
             'n = lax.psum(weights.sum(), "dp")\n'
             'loss, gradient = lax.pmean(total, "dp") / n, lax.pmean(gradient, "dp") / n',),
            "use psum, not pmean",
        ),
        (
            ("def mean(w):\n    total = sum_of_losses(w, x, y, weights)\n"
             '    return lax.psum(total, "dp") / lax.psum(weights.sum(), "dp")\n'
             "loss, gradient = jax.value_and_grad(mean)(w)",),
            "went through a psum",
        ),
    ],
    8: [
        (
            ('full = lax.all_gather(w, "dp", tiled=True)\n'
             'local_gradient = lax.psum(jax.grad(sum_of_losses)(full, x, y) / ROWS, "dp")',),
            "lax.psum keeps the full sum",
        ),
        (
            ('full = lax.all_gather(w, "dp", tiled=True)\n'
             'gradient = lax.psum(jax.grad(sum_of_losses)(full, x, y) / ROWS, "dp")\n'
             'local_gradient = lax.dynamic_slice_in_dim(gradient, len(w) * lax.axis_index("dp"), len(w))',),
            "the numbers are right, but each device sends",
        ),
        (
            ('full = lax.all_gather(w, "dp", tiled=True)\n'
             'local_gradient = lax.psum_scatter(jax.grad(sum_of_losses)(full, x, y), "dp", tiled=True)',),
            "divide by ROWS",
        ),
        (
            ('full = lax.all_gather(w, "dp", tiled=True)\n'
             'local_gradient = lax.psum_scatter(jax.grad(sum_of_losses)(full, x, y) / len(x), "dp", tiled=True)',),
            "dp times too large",
        ),
        (
            ('full = lax.all_gather(w, "dp", tiled=True)\ngradient = jax.grad(sum_of_losses)(full, x, y) / ROWS\n'
             'local_gradient = gradient.reshape(-1, len(w))[lax.axis_index("dp")]',),
            "with the gradient of its own rows",
        ),
        (
            ('full = lax.all_gather(w, "dp")\nown_gradient = jax.grad(sum_of_losses)(full, x, y) / ROWS',),
            "tiled=True to lax.all_gather",
        ),
        (
            ('def loss(w):\n    return sum_of_losses(lax.all_gather(w, "dp", tiled=True), x, y)\n'
             'local_gradient = lax.psum_scatter(jax.grad(loss)(w), "dp", tiled=True) / ROWS',),
            "the gradient of lax.all_gather is a reduce-scatter",
        ),
    ],
    9: [
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\n'
             'y = x + lax.psum(jax.nn.relu(tokens @ up) @ down, "mp")[: len(x)]',),
            "first tokens",
        ),
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\n'
             'full = lax.psum(jax.nn.relu(tokens @ up) @ down, "mp")\n'
             'y = x + lax.dynamic_slice_in_dim(full, len(x) * lax.axis_index("mp"), len(x))',),
            "the numbers are right, but each device sends",
        ),
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\nparts = jax.nn.relu(tokens @ up) @ down\n'
             'y = x + parts.reshape(-1, *x.shape)[lax.axis_index("mp")]',),
            "the parts of the other devices are missing",
        ),
        (("y = x + jax.nn.relu(norm(x) @ up) @ down",), "Nothing was gathered or added"),
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\n'
             'y = lax.psum_scatter(jax.nn.relu(tokens @ up) @ down, "mp", tiled=True)',),
            "residual is missing",
        ),
        (
            ('full = lax.all_gather(x, "mp", tiled=True)\n'
             'y = lax.psum_scatter(full + jax.nn.relu(norm(full) @ up) @ down, "mp", tiled=True)',),
            "it counts mp times",
        ),
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\n'
             'y = lax.psum(jax.nn.relu(tokens @ up) @ down, "mp")',),
            "keep this device's own part",
        ),
        (
            ('tokens = lax.all_gather(norm(x), "mp", tiled=True)\n'
             'y = x + lax.psum_scatter(jax.nn.relu(tokens @ up) @ down, "mp")',),
            "Pass tiled=True to lax.psum_scatter",
        ),
    ],
    10: [
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\ndone = work(matrices[0], rows)\n"
             "if tick < m:\n    y = y.at[tick].set(done)\n"
             'received = lax.ppermute(done, "pp", to_next)',),
            "stored at the number of the tick",
        ),
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\ndone = work(matrices[0], rows)\n"
             "if tick >= stages:\n    y = y.at[tick - stages].set(done)\n"
             'received = lax.ppermute(done, "pp", to_next)',),
            "off by one tick",
        ),
        (
            ("done = work(matrices[0], microbatches[min(tick, m - 1)])\n"
             "if tick >= stages - 1:\n    y = y.at[tick - stages + 1].set(done)\n"
             'received = lax.ppermute(done, "pp", to_next)',),
            "only stage 0 reads the batch",
        ),
        (
            ("done = work(matrices[0], received)\n"
             "if tick >= stages - 1:\n    y = y.at[tick - stages + 1].set(done)\n"
             'received = lax.ppermute(done, "pp", to_next)',),
            "stage 0 must take microbatch",
        ),
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\ndone = work(matrices[0], rows)\n"
             "if tick >= stages - 1:\n    y = y.at[tick - stages + 1].set(done)\n"
             'received = lax.ppermute(done, "pp", [(s + 1, s) for s in range(stages - 1)])',),
            "sent to the stage before",
        ),
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\ndone = work(matrices[0], rows)\n"
             "if tick >= stages - 1:\n    y = y.at[tick - stages + 1].set(done)\nreceived = done",),
            "nothing reached the last stage, or nothing was stored",
        ),
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\n"
             "result = work(matrices[0], rows)\n"
             "if tick - (stages - 1) >= 0:\n    y.at[tick - (stages - 1)].set(result)\n"
             'received = lax.ppermute(result, "pp", to_next)',),
            "keep the new array: y = y.at[...].set(...)",
        ),
        (
            ("rows = microbatches[tick] if stage == 0 else received\nreceived = work(matrices[0], rows)",),
            "choose with jnp.where, not with if",
        ),
        (
            ("rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)\n"
             "result = work(matrices[0], rows)\n"
             "if tick > stages:\n    y = y.at[tick - stages].set(result)\n"
             'received = lax.ppermute(result, "pp", to_next)',),
            "off by one tick",
        ),
    ],
    11: [
        (
            ("owner = (index + step) % devices\n{merge}\n{send}",),
            "the block of device i - step",
        ),
        (("owner = (index - step) % devices\n{merge}",), "did not move"),
        (("owner = index\n{merge}\n{send}",), "own positions"),
        (("owner = (index - step) % devices\n{merge_without_rescale}\n{send}",), "not rescaled when m rose"),
        (("owner = (index - step) % devices\nif step:\n    {indented_merge}\n{send}",), "own block was missed"),
        (
            ("owner = (index - step) % devices\nif step + 1 < devices:\n    {indented_merge}\n{send}",),
            "One block was missed",
        ),
        (
            ("owner = (index - step) % devices\n{merge}\nk = lax.ppermute(k, \"cp\", to_next)",),
            "send both k and v",
        ),
    ],
    12: [
        (
            ('squares = lax.psum(jnp.square(w).sum(), "mp")\n'
             'return {"norm": jnp.sqrt(squares), "mean": lax.psum((x @ w).mean(), "mp")}', "return 0"),
            "average them (pmean)",
        ),
        (
            ('full = lax.all_gather(w, "mp", axis=1, tiled=True)\nreturn dense(x, full)', "return 0"),
            "the numbers are right, but each device sends",
        ),
        (("return dense(x, w)", "return 0"), "a psum of the squares and a pmean of the mean are"),
        (
            ('return lax.psum(dense(x, w), "mp")', "return 0"),
            "`mean` is mp = 8 times too large",
        ),
        (
            ('norm = lax.psum(jnp.linalg.norm(w), "mp")\n'
             'return {"norm": norm, "mean": lax.pmean((x @ w).mean(), "mp")}',
             "return 0"),
            "add the squares first",
        ),
        (("{right}", "return 2 * (n - 1) / n * 4"), "that is half"),
        (("{right}", "return 2 * 2 * (n - 1) / n"), "float32 number has 4 bytes"),
        (("{right}", "return 2 * 2 * 4"), "does not send all of the array"),
        (("{right}", 'return "two"'), "expected a number"),
    ],
    13: [
        (('mean = lax.pmean(error, "dp")', "{apply}"), "taken over dp only"),
        (('mean = lax.pmean(error, "rows")', "{apply}"), "of this device's block only"),
        (('mean = lax.psum(error, ("rows", "dp"))', "{apply}"), "pmean divides by their number"),
        (
            ('mean = lax.psum(error, ("rows", "dp")) / lax.axis_size("dp")', "{apply}"),
            "as many positions as",
        ),
        (('mean = lax.psum(error, ("rows", "dp")) / lax.axis_size("rows")', "{apply}"), "the rows of one block"),
        (("mean = error", "{apply}"), "There is no mean"),
        (('mean = lax.pmean(error, ("dp", "rows"))', "loss, centred = of_one_row(x, y)"), "Apply of_one_row with"),
        (
            ('mean = lax.pmean(error, ("dp", "rows"))',
             'loss, centred = jax.vmap(of_one_row, axis_name="rows")(x, y)'),
            "`loss` has shape [6] on each device; expected the block [] of []: there is one axis too many",
        ),
    ],
    14: [
        (("{own}\ny = mix(x, own, up, down)\n{balance}",), "a psum over mp is missing"),
        (('y = lax.psum(mix(x, gates[:, : len(up)], up, down), "mp")\n{balance}',), "gates of the first experts"),
        (
            ('n = len(up)\nown = choose(jax.nn.softmax(x @ router)[:, n * lax.axis_index("mp") + jnp.arange(n)])\n'
             'y = lax.psum(mix(x, own, up, down), "mp")\n{balance}',),
            "Choose among all",
        ),
        (
            ('{own}\ny = lax.psum(mix(x, own, up, down), "mp")\n'
             'balance = lax.psum(8 * (share * mean_score).sum(), "dp") / lax.axis_size("dp")',),
            "average the shares and the scores over dp first, then multiply",
        ),
        (
            ('{own}\ny = lax.psum(mix(x, own, up, down), "mp")\nbalance = 8 * share @ mean_score',),
            "is that of this device's tokens",
        ),
        (
            ('{own}\ny = lax.psum(mix(x, own, up, down), "mp")\n'
             'balance = 8 * lax.psum(share, "dp") @ lax.psum(mean_score, "dp")',),
            "they are means: use pmean",
        ),
    ],
}  # fmt: skip

_MERGE = """\
scores = mask_scores(q @ k.T, n * index + jnp.arange(n), n * owner + jnp.arange(n))
new_m = jnp.maximum(m, scores.max(1))
p = jnp.exp(scores - new_m[:, None])
total = jnp.exp(m - new_m) * total + p.sum(1)
weighted = jnp.exp(m - new_m)[:, None] * weighted + p @ v
m = new_m"""
PARTS = {
    "{merge}": _MERGE,
    "{indented_merge}": _MERGE.replace("\n", "\n    "),
    "{merge_without_rescale}": _MERGE.replace("jnp.exp(m - new_m) * ", "").replace(
        "jnp.exp(m - new_m)[:, None] * ", ""
    ),
    "{send}": 'k, v = lax.ppermute((k, v), "cp", to_next)',
    "{right}": (
        'squares, mean = lax.psum(jnp.square(w).sum(), "mp"), lax.pmean((x @ w).mean(), "mp")\n'
        'return {"norm": jnp.sqrt(squares), "mean": mean}'
    ),
    "{own}": 'own = lax.dynamic_slice_in_dim(gates, len(up) * lax.axis_index("mp"), len(up), 1)',
    "{balance}": 'balance = gates.shape[1] * lax.pmean(share, "dp") @ lax.pmean(mean_score, "dp")',
    "{apply}": 'means, centred = jax.vmap(of_one_row, axis_name="rows")(x, y)\nloss = means[0]',
}
