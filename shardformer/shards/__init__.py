"""The model as one shard sees it: its slice of every array, and the named axes `dp`, `mp`, `cp` and `pp`.

Every collective of the forward pass is written out; those of the backward pass are the transposes. They are over `mp`
within the model, over `dp` where gradients and losses are averaged and where ZeRO gathers, over `pp` from stage to
stage, over `cp` in attention. The modules are differentiated under
`jax.shard_map(..., check_vma=True)`, where plain collectives have exact gradients. They are initialised on named axes
of size 1, where local shapes equal global ones.

Glossary: B local batch, T tokens, S tokens that are attended to, D d_model, H heads, K head size, F feed-forward
width, V vocabulary, L layers. A suffix gives an array's local shape. A lower-case letter is an axis that is split
over `mp` (`q_BThK`: this shard's heads).
"""

from shardformer.shards.dropout import Dropout
from shardformer.shards.transformer import CausalTransformerShard

__all__ = ["CausalTransformerShard", "Dropout"]
