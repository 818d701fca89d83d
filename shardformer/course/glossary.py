"""The words of the course, each with a picture in characters."""

GLOSSARY = {
    "mesh": (
        "The devices in a grid with named axes. A device has one position along each axis.",
        """
        mp0  mp1  mp2  mp3
  dp0   [0]  [1]  [2]  [3]
  dp1   [4]  [5]  [6]  [7]      dp=2 mp=4
""",
    ),
    "shard": (
        "The block of an array that one device holds. A PartitionSpec names the mesh axis of each dimension.",
        """
  full array, P("mp")    | a a | b b | c c | d d |
  shards on mp0 .. mp3     [0]   [1]   [2]   [3]
""",
    ),
    "replicated": (
        "Held in full by every device along an axis.",
        """
  P()      [a b c d]  [a b c d]  [a b c d]  [a b c d]
""",
    ),
    "shard view": (
        "The code of one device: it sees blocks, and meets other devices only in collectives over named axes.",
        """
  global view   y = x @ w                       one function, full arrays
  shard view    y = psum(x_block @ w_block)     the same function on each device
""",
    ),
    "all-reduce": (
        "psum: adds the parts of all devices, and every device has the sum. 2 (n - 1) / n of its bytes are sent.",
        """
  before   [a]  [b]  [c]  [d]
  after    [s]  [s]  [s]  [s]      s = a + b + c + d
""",
    ),
    "all-gather": (
        "all_gather: every device has the blocks of all. (n - 1) / n of the result's bytes are sent.",
        """
  before   [a]     [b]     [c]     [d]
  after    [abcd]  [abcd]  [abcd]  [abcd]
""",
    ),
    "reduce-scatter": (
        "psum_scatter: adds the parts, and each device keeps one block of the sum. Half of an all-reduce.",
        """
  before   [a0 a1]  [b0 b1]
  after    [a0+b0]  [a1+b1]
""",
    ),
    "collective-permute": (
        "ppermute: each device sends its block to one other device, as in a ring.",
        """
  before   [a]->[b]->[c]->[d]->
  after    [d]  [a]  [b]  [c]
""",
    ),
    "data parallel": (
        "Each device has the full model and a part of the batch (axis dp). Gradients are summed over dp.",
        """
  rows      | 0 1 | 2 3 | 4 5 | 6 7 |
  devices     [W]   [W]   [W]   [W]      all-reduce of the gradients
""",
    ),
    "tensor parallel": (
        "Each device has a part of every matrix (axis mp): columns first, then rows, then an all-reduce.",
        """
  x -> | up columns |  gelu  | down rows | -> part --+
  x -> | up columns |  gelu  | down rows | -> part --+--> sum
""",
    ),
    "sequence parallel": (
        "Before and after each pair of matrices a device keeps some tokens only: the all-reduce in two halves.",
        """
  [tokens 0-3] --all-gather--> up, down --reduce-scatter--> [tokens 0-3]
  [tokens 4-7] --all-gather--> up, down --reduce-scatter--> [tokens 4-7]
""",
    ),
    "ZeRO": (
        "Data parallel whose devices each keep a part of the optimizer (1) and of the parameters (3).",
        """
  keep [w0]  [w1]  [w2]  [w3]
  all-gather -> [w0 w1 w2 w3] on each -> gradient -> reduce-scatter -> [g0]  [g1]  [g2]  [g3]
""",
    ),
    "pipeline": (
        "Each device has some layers (axis pp); microbatches follow one another through the stages.",
        """
  tick      0    1    2    3
  stage 0  m0   m1   m2    -
  stage 1   -   m0   m1   m2        '-': a bubble
""",
    ),
    "ring attention": (
        "Each device has the queries of some tokens (axis cp); keys and values travel around a ring.",
        """
  step 0   q0 k0   q1 k1   q2 k2
  step 1   q0 k2   q1 k0   q2 k1
  step 2   q0 k1   q1 k2   q2 k0
""",
    ),
    "vocabulary parallel": (
        "The table of embeddings and the head are split over the tokens of the vocabulary.",
        """
  tokens    0 .. 99 | 100 .. 199 | 200 .. 299
  devices     [0]       [1]          [2]        one device has the vector, the others add 0
""",
    ),
}


def format_glossary() -> str:
    """Returns every word, its meaning and its picture."""
    return "\n".join(f"{word}: {meaning}\n{picture}" for word, (meaning, picture) in GLOSSARY.items())
