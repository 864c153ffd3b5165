#!/usr/bin/env bash
# Check and measure mtrain on one GPU. Run it once on a new kind of GPU, or after changing kernels:
#   OUT=FOLDER bash scripts/gpu_check.sh
# or in two calls of at most four minutes, without bench.py: first the checks, then the measurements:
#   OUT=FOLDER WORK=FOLDER PARTS=right bash scripts/gpu_check.sh
#   OUT=FOLDER WORK=FOLDER PARTS=fast bash scripts/gpu_check.sh
# They need PyTorch with CUDA, the dependencies of mtrain, pytest
# with pytest-xdist, and Transformers. The interpreter is .venv/bin/python if it has PyTorch, otherwise python3. On a
# machine without internet, wheels in .whl/ are installed first, into a folder in $WORK.
#
# $OUT/summary.txt lists the exit status of each part and the most important lines of the other files, which are
# tests, check, demo, resume, train, decode, profile, bench and multi30k, all .txt. The exit status is 1 if a part has failed
# or was stopped. A part that fails does not stop the others. The parts that are not timed run first, all at once;
# then the timed parts, one by one, the most valuable first.
#
# Variables, all but OUT optional, with defaults in parentheses:
#   OUT         folder for the results
#   WORK        folder for runs and compiled kernels, which is kept (a temporary one, which is removed)
#   PARTS       names of parts, or right, fast, all (all). `translate` and `bench.py` need the run of `demo`
#   DEVICE      cuda, cuda:N or cpu (cuda)
#   BUDGET      seconds after which no part starts, and running parts are stopped (240 for right or fast, otherwise 545)
#   PYTHON      the interpreter
#   MULTI30K    folder with train, val and test_2016_flickr in .en and .de; adds the parts multi30k and translate-base
#   TINY        1: small sizes, to test this script: TINY=1 DEVICE=cpu takes some minutes. Parts are not limited then
set -u
cd "$(dirname "$0")/.."
: "${OUT:?set OUT to a folder for the results}" "${DEVICE:=cuda}" "${TINY:=}" "${PARTS:=all}"
started=$SECONDS
mkdir -p "$OUT"
summary=$OUT/summary.txt
: >>"$summary"
case $PARTS in right | fast) : "${BUDGET:=240}" ;; *) : "${BUDGET:=545}" ;; esac
case $PARTS in
    right) PARTS="environment ceiling tests check-training check-decoding demo resume multi30k" ;;
    fast) PARTS="train-base decode translate translate-base peers-base train-tiny train-big decode-transformers profile-training
        profile-decoding peers-big" ;;
esac
PARTS=" $(echo $PARTS) "

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
ended=$(mktemp -p "$WORK" ended.XXXXXX) # a line for each part that has failed

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if .venv/bin/python -c 'import torch' 2>/dev/null; then PYTHON=.venv/bin/python; fi
fi
if [ -d .whl ] && ! "$PYTHON" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade \
    --target "$WORK/site" .whl/*.whl 2>>"$summary"; then
    echo "the wheels in .whl could not be installed" >>"$summary"
fi
export PYTHONPATH="$PWD:$PWD/scripts:$WORK/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR="$WORK/triton"
export OUT WORK DEVICE TINY PYTHON
if [ -n "$TINY" ]; then export OMP_NUM_THREADS=1; fi

say() { echo "[$((SECONDS - started)) s] $*" | tee -a "$summary"; }

# Whether a part is to run
wanted() {
    [ "$PARTS" = " all " ] || [[ $PARTS == *" $1 "* ]]
}

# part NAME LIMIT FILE COMMAND...: run a command for up to LIMIT seconds; its output is appended to $OUT/FILE
part() {
    local name=$1 limit=$2 file=$OUT/$3 rest=$((BUDGET - SECONDS + started)) began=$SECONDS code
    shift 3
    wanted "$name" || return 0
    if [ "$rest" -lt 12 ]; then
        say "$name: no time left"
        echo "$name" >>"$ended"
        return
    fi
    if [ "$limit" -gt "$rest" ] || [ -n "$TINY" ]; then limit=$rest; fi
    printf '\n===== %s (limit %s s): %s\n' "$name" "$limit" "$*" >>"$file"
    timeout -k 5 "$limit" "$@" >>"$file" 2>&1 </dev/null
    code=$?
    if [ "$code" != 0 ]; then echo "$name" >>"$ended"; fi
    if [ "$code" = 124 ]; then code="124 (stopped after $limit s)"; fi
    say "$name: exit $code, $((SECONDS - began)) s"
}

# measure NAME LIMIT FILE ARGUMENT...: a part of the package scripts/gpu
measure() {
    part "${@:1:3}" "$PYTHON" -m gpu --device "$DEVICE" ${TINY:+--tiny} "${@:4}"
}

# Train a base model on the English and German captions of Multi30k, and score the test set
multi30k() {
    local data=() side lang set size=base steps=1200
    if [ -n "$TINY" ]; then size=micro steps=4; fi
    for side in source target; do
        lang=en && [ "$side" = source ] || lang=de
        for set in train val:validation test_2016_flickr:test.test_2016_flickr; do
            data+=(--set "data.${set#*:}.$side=$MULTI30K/${set%:*}.$lang")
        done
    done
    "$PYTHON" -m mtrain fit configs/multi30k/en-de-plain.yaml --run-dir "$WORK/multi30k" --device "$DEVICE" "${data[@]}" \
        --set model.preset="$size" --set training.batch_tokens=16384 --set training.learning_rate=0.0007 \
        --set training.warmup_steps=300 --set training.max_steps="$steps" \
        --set training.validate_every=600 --set training.checkpoint_every=600 &&
        "$PYTHON" -m mtrain evaluate "$WORK/multi30k" --device "$DEVICE"
}

# translate RUN TEXT LINES BEAMS...: translate as many lines, which repeat a text, on the command line
translate() {
    local run=$1 text=$2 lines=$3 beams
    shift 3
    if [ -n "$TINY" ]; then lines=300; fi
    for _ in $(seq $((lines / $(wc -l <"$text") + 1))); do cat "$text"; done | head -n "$lines" >"$run.in"
    for beams in "$@"; do
        rm -f "$run.out"
        TIMEFORMAT="translate by ${run##*/}, beam $beams: $lines lines in %R s, start included"
        time "$PYTHON" -m mtrain translate "$run" -i "$run.in" -o "$run.out" --device "$DEVICE" \
            --set decoding.beam_size="$beams" || return
    done
}

# scripts/bench.py on the toy corpus; the other tools run in this environment, too
bench() {
    local peers=$WORK/peers
    mkdir -p "$peers/bin"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "$PYTHON")" >"$peers/bin/python"
    chmod +x "$peers/bin/python"
    cut -f 1 mtrain/data/toy/test.tsv >"$WORK/test.en"
    "$PYTHON" scripts/bench.py translate "$WORK/toy" "$WORK/test.en" --device "$DEVICE" --repeats 1 --length 12 \
        --against marian-hf --peer-precision bf16 --peer-env "$peers" &&
        "$PYTHON" scripts/bench.py train configs/toy-en-fr.yaml --device "$DEVICE" --repeats 1 --seconds "${TINY:-4}" \
            --warmup "${TINY:-2}" --set model.preset=tiny --set tokenizer.vocab_size=480 --set training.batch_tokens=4096 \
            --against torch --against marian-hf --peer-precision bf16 --peer-env "$peers" --profile
}
export -f multi30k translate bench

# ------------------------------------------------------------------------------------------------- the machine
if wanted environment && command -v nvidia-smi >/dev/null; then nvidia-smi >>"$summary" 2>&1; fi
measure environment 60 summary.txt environment
measure ceiling 40 summary.txt ceiling

# ------------------------------------------------------------------------------------------ not timed, all at once
limit=190
mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
tests=(-m gpu -n 3 "${tests[@]}")
if [ "$DEVICE" = cpu ]; then tests=(tests/unit/kernels/test_precision.py); fi
part tests "$limit" tests.txt "$PYTHON" -m pytest -p no:cacheprovider --durations=12 --show-capture=no -rP "${tests[@]}" &
measure check-training "$limit" check.txt check-training small 4096 &
measure check-decoding "$limit" check.txt check-decoding small &
part demo "$limit" demo.txt "$PYTHON" -m mtrain demo --device "$DEVICE" --run-dir "$WORK/toy" \
    ${TINY:+--set training.max_steps=6} &
measure resume "$limit" resume.txt resume "$WORK" &
if [ -n "${MULTI30K:-}" ]; then part multi30k 230 multi30k.txt bash -c multi30k & fi
wait

# ------------------------------------------------------------------------------------------- timed, one by one
measure train-base 50 train.txt train base 25000 4096
measure decode 50 decode.txt decode base
cut -f 1 mtrain/data/toy/test.tsv >"$WORK/toy.txt"
part translate 60 decode.txt bash -c 'translate "$WORK/toy" "$WORK/toy.txt" 30000 1 5'
if [ -n "${MULTI30K:-}" ]; then # for a model of a usual size
    part translate-base 80 decode.txt bash -c 'translate "$WORK/multi30k" "$MULTI30K/train.en" 200000 1'
fi
measure peers-base 45 train.txt peers base 25000
measure train-tiny 25 train.txt train tiny 4096
measure train-big 40 train.txt train big 25000
measure decode-transformers 30 decode.txt decode-transformers base
measure profile-training 40 profile.txt profile-training base 25000 4096
measure profile-decoding 30 profile.txt profile-decoding base
measure peers-big 40 train.txt peers big 25000
part bench.py 120 bench.txt bash -c bench

say "done"
for file in train decode profile resume check tests demo multi30k; do
    if [ -e "$OUT/$file.txt" ]; then
        grep -h 'tokens/s\|lines in\|waits in\|GPU busy\|calls per\|losses\|weights\|translations differ\|^numbers\|^failed\|passed\|BLEU on' "$OUT/$file.txt"
    fi
done | cut -c 1-260 | tee -a "$summary"
[ ! -s "$ended" ]
