"""Families that are not computed, and the part of each that is missing."""

_BY_PART = {
    "attention through a compressed latent (MLA) of this form": (
        "deepseek_v32 deepseek_v4 kimi_k25 minicpm3 glm_moe_dsa "
        "mistral_large4 longcat_flash axk1 axk2 hy_v4 dots3_note dots3_note_text bailing_hybrid"
    ),
    "state-space layers (Mamba)": (
        "mamba mamba2 falcon_mamba bamba jamba zamba zamba2 nemotron_h falcon_h1 granitemoehybrid"
    ),
    "layers of linear attention": (
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text kimi_linear olmo_hybrid "
        "minimax lara_mini"
    ),
    "recurrent layers": "rwkv xlstm recurrent_gemma",
    "layers that are computed again and again": "hrm_text dory",
    "convolutions over tokens": "lfm2 lfm2_moe lfm3 zaya inkling_text inkling2_text inkling2_loop_text",
    "gates on the outputs of attention": "afmoe laguna beam",
    "experts of attention": "jetmoe",
    "experts that a threshold chooses (SparseMixer)": "phimoe",
    "bounds of queries, keys and values (clip_qkv)": "dbrx",
    "attention by hashes": "reformer",
    "masks that values determine": "doge",
    "patches of bytes": "blt",
    "one matrix of q, k and v in a mixture (Sarvam without latents)": "sarvam_moe",
    "a sink in the attention of each head": "granite_swa granitemoe_swa flint mimo_v2_flash",
    "an activation with parameters (xIELU)": "apertus apertus1p5_text",
    "differences of two attentions": "diffllama",
    "weights of two bits": "bitnet",
    "embeddings of each layer": "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    "fixed sinusoids of this form as positions": "ctrl",
    "norms of queries and keys that subtract the mean": "persimmon fuyu",
    "positions relative to segments": "cpmant",
    "attention to images": "mllama",
    "codebooks of sounds": "moshi musicgen musicgen_melody",
    "codebooks of images": "emu3",
    "an encoder of images": "got_ocr2 git",
    "an encoder of sounds": "moss_transcribe_diarize",
    "adapters of images and of sounds, in each layer": "phi4_multimodal",
    "rotary positions in three dimensions (mrope)": "cohere_compass_text",
    "attention to blocks of tokens that an indexer chooses": "minimax_m3_vl_text",
    "attention to the keys and values of another model": "gemma4_assistant gemma4_unified_assistant",
    "a layer between the last norm and the head": "modernbert-decoder",
    "a bias of attention in the last layer only": "gpt_neox_japanese",
    "a router that adds biases to logits, before their sigmoids": "kolibri1",
    "the mean of shared and routed experts, in a parallel block": "cohere2_moe",
    "norms of queries and keys after their rotation": "hunyuan_v1_moe nanochat",
    "an encoder besides its decoder": (
        "bart mbart t5 pegasus marian blenderbot blenderbot-small mvp plbart prophetnet bigbird_pegasus whisper trocr"
    ),
    "attention in both directions": (
        "bert roberta electra camembert xlm xlm-roberta xlm-roberta-xl rembert roformer big_bird ernie megatron-bert "
        "data2vec-text roberta-prelayernorm roc_bert xmod xlnet bert-generation"
    ),
}
REJECTED = {name: part for part, names in _BY_PART.items() for name in names.split()}
