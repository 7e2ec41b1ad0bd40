"""A random-weight Llama made on the spot: small enough to serve anywhere, real enough for any engine path."""

from pathlib import Path

WORDS = (
    "the a model serves many requests and every request may teach the next one what to expect "
    'Write Python code that sorts lists, answers questions in JSON {"name": "value", "count": 12} '
    "system user assistant tool function def return import for if else while print hello world "
    "0123456789 .,:;?!"
)
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config, bf16 weights, a byte-level BPE tokenizer and a ChatML template; returns `folder`.

    4 layers, hidden 64, 4 heads of 32 (2 KV heads), intermediate 128, vocab 512, 2,048 positions.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [WORDS] * 8, trainers.BpeTrainer(vocab_size=512, special_tokens=specials, initial_alphabet=alphabet)
    )
    missing = 512 - bpe.get_vocab_size()
    bpe.add_special_tokens([f"<|unused_{i}|>" for i in range(missing)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
