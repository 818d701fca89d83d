"""Hugging Face's model families, one file a family. To add a family: write its file, and name it here."""

from shardformer.config import Config
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_arcee import ARCEE
from shardformer.convert.families.hf_aria import ARIA
from shardformer.convert.families.hf_biogpt import BIOGPT
from shardformer.convert.families.hf_bloom import BLOOM
from shardformer.convert.families.hf_codegen import CODEGEN, PROGEN
from shardformer.convert.families.hf_cohere import COHERE
from shardformer.convert.families.hf_cohere2 import COHERE_2
from shardformer.convert.families.hf_cwm import CWM
from shardformer.convert.families.hf_deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from shardformer.convert.families.hf_ernie4_5 import ERNIE_4_5
from shardformer.convert.families.hf_ernie4_5_moe import ERNIE_4_5_MOE
from shardformer.convert.families.hf_exaone4 import EXAONE_4
from shardformer.convert.families.hf_exaone_moe import EXAONE_MOE
from shardformer.convert.families.hf_falcon import FALCON
from shardformer.convert.families.hf_flex_olmo import FLEX_OLMO
from shardformer.convert.families.hf_gemma import GEMMA_1
from shardformer.convert.families.hf_gemma2 import GEMMA_2
from shardformer.convert.families.hf_gemma3 import GEMMA_3
from shardformer.convert.families.hf_glm import GLM
from shardformer.convert.families.hf_glm4 import GLM_4
from shardformer.convert.families.hf_glm4_moe import DOTS_1, GLM_4_MOE, SOLAR_OPEN
from shardformer.convert.families.hf_glm4_moe_lite import GLM_4_MOE_LITE
from shardformer.convert.families.hf_gpt2 import GPT2
from shardformer.convert.families.hf_gpt_bigcode import GPT_BIGCODE
from shardformer.convert.families.hf_gpt_neo import GPT_NEO
from shardformer.convert.families.hf_gpt_neox import GPT_NEOX
from shardformer.convert.families.hf_gpt_oss import GPT_OSS
from shardformer.convert.families.hf_gptj import GPTJ
from shardformer.convert.families.hf_granite import GRANITE
from shardformer.convert.families.hf_granitemoe import GRANITE_MOE, GRANITE_MOE_SHARED
from shardformer.convert.families.hf_helium import HELIUM
from shardformer.convert.families.hf_hunyuan import HUNYUAN
from shardformer.convert.families.hf_hy_v3 import HY_V3
from shardformer.convert.families.hf_hyperclovax import HYPERCLOVA_X
from shardformer.convert.families.hf_jais2 import JAIS_2
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_llama4 import LLAMA_4
from shardformer.convert.families.hf_llama_names import EXAONE, INTERNLM_3, IQUEST_CODER
from shardformer.convert.families.hf_mellum import MELLUM
from shardformer.convert.families.hf_minimax_m2 import MINIMAX_M2
from shardformer.convert.families.hf_ministral import MINISTRAL
from shardformer.convert.families.hf_ministral3 import MINISTRAL_3
from shardformer.convert.families.hf_mistral import MISTRAL
from shardformer.convert.families.hf_mistral4 import MISTRAL_4
from shardformer.convert.families.hf_mixtral import MIXTRAL
from shardformer.convert.families.hf_mpt import MPT
from shardformer.convert.families.hf_nemotron import NEMOTRON
from shardformer.convert.families.hf_olmo import OLMO
from shardformer.convert.families.hf_olmo2 import OLMO_2
from shardformer.convert.families.hf_olmo3 import OLMO_3
from shardformer.convert.families.hf_olmoe import OLMOE
from shardformer.convert.families.hf_openai_gpt import OPENAI_GPT
from shardformer.convert.families.hf_opt import OPT
from shardformer.convert.families.hf_phi import PHI
from shardformer.convert.families.hf_phi3 import PHI_3
from shardformer.convert.families.hf_qwen2 import QWEN_2
from shardformer.convert.families.hf_qwen2_moe import QWEN_2_MOE
from shardformer.convert.families.hf_qwen3 import QWEN_3
from shardformer.convert.families.hf_qwen3_moe import QWEN_3_MOE
from shardformer.convert.families.hf_sarvam import SARVAM_MLA
from shardformer.convert.families.hf_seed_oss import SEED_OSS
from shardformer.convert.families.hf_smollm3 import SMOLLM_3
from shardformer.convert.families.hf_stablelm import STABLELM
from shardformer.convert.families.hf_starcoder2 import STARCODER_2
from shardformer.convert.families.hf_vaultgemma import VAULT_GEMMA
from shardformer.convert.families.hf_xglm import XGLM
from shardformer.convert.families.hf_youtu import YOUTU
from shardformer.convert.families.layout import Part, Stored, replace_head
from shardformer.convert.families.rejected import REJECTED

__all__ = ["FAMILIES", "REJECTED", "Family", "Part", "Stored", "list_arrays", "list_stored"]

FAMILIES = {
    "gptj": GPTJ,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "qwen2": QWEN_2,
    "qwen3": QWEN_3,
    "smollm3": SMOLLM_3,
    "granite": GRANITE,
    "olmo": OLMO,
    "qwen3_moe": QWEN_3_MOE,
    "qwen2_moe": QWEN_2_MOE,
    "olmoe": OLMOE,
    "olmo2": OLMO_2,
    "olmo3": OLMO_3,
    "stablelm": STABLELM,
    "phi": PHI,
    "phi3": PHI_3,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "ministral": MINISTRAL,
    "starcoder2": STARCODER_2,
    "gemma": GEMMA_1,
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_3,
    "opt": OPT,
    "bloom": BLOOM,
    "mpt": MPT,
    "falcon": FALCON,
    "cohere": COHERE,
    "cohere2": COHERE_2,
    "codegen": CODEGEN,
    "progen": PROGEN,
    "gpt_bigcode": GPT_BIGCODE,
    "exaone4": EXAONE_4,
    "exaone": EXAONE,
    "internlm3": INTERNLM_3,
    "iquestcoder": IQUEST_CODER,
    "arcee": ARCEE,
    "nemotron": NEMOTRON,
    "jais2": JAIS_2,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE_4_5,
    "ernie4_5_moe": ERNIE_4_5_MOE,
    "helium": HELIUM,
    "glm": GLM,
    "glm4": GLM_4,
    "cwm": CWM,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "hyperclovax": HYPERCLOVA_X,
    "vaultgemma": VAULT_GEMMA,
    "flex_olmo": FLEX_OLMO,
    "glm4_moe": GLM_4_MOE,
    "dots1": DOTS_1,
    "solar_open": SOLAR_OPEN,
    "exaone_moe": EXAONE_MOE,
    "minimax_m2": MINIMAX_M2,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "glm4_moe_lite": GLM_4_MOE_LITE,
    "sarvam_mla": SARVAM_MLA,
    "youtu": YOUTU,
    "ministral3": MINISTRAL_3,
    "mistral4": MISTRAL_4,
    "hunyuan_v1_dense": HUNYUAN,
    "xglm": XGLM,
    "openai-gpt": OPENAI_GPT,
    "biogpt": BIOGPT,
    "hy_v3": HY_V3,
    "mellum": MELLUM,
    "aria_text": ARIA,
    "llama4_text": LLAMA_4,
}


def list_stored(family: str, config: Config) -> list[Stored]:
    """Lists all arrays of a model, in the order in which they are written."""
    return list_arrays(FAMILIES[family], config)


def list_arrays(family: Family, config: Config) -> list[Stored]:
    """Lists all arrays of a model of a family that FAMILIES may lack."""
    outside = family.outside(config)
    outside = outside if config.objective.has_vocabulary else replace_head(outside, config)
    result = [stored._replace(parts=_prefixed("transformer/", stored.parts)) for stored in outside]
    for i in range(config.model.layers):
        for stored in family.layer(config):
            layers = config.mixture.layers_of(stored.parts[0].ours)
            parts = _prefixed("transformer/layers/", stored.parts)
            if i in layers:
                row = layers.index(i)
                result.append(stored._replace(name=stored.name.format(i), parts=parts, layer=i, row=row))
    return result


def _prefixed(prefix: str, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part._replace(ours=prefix + part.ours) for part in parts)
