#!/usr/bin/env bash
# Train and score the best models for Multi30k (docs/how-to/rerank-and-mbr.md), using no other data. Run it in the root of this
# repository, with `mtrain` on the PATH (. .venv/bin/activate) and the captions in English, German and French in
# data/multi30k:
#   bash scripts/multi30k.sh de    # three seeds: runs/multi30k-en-de-mean, and the same with -2 and -3
#   bash scripts/multi30k.sh fr    # runs/multi30k-en-fr-mean
# After an interruption, the same command resumes. The configs in configs/multi30k explain each training corpus.
set -euo pipefail  # has no effect in functions called within && or ||, so none is
text=data/multi30k
target=$*
case $target in de | fr) ;; *) echo "usage: bash scripts/multi30k.sh de|fr" >&2 && exit 2 ;; esac
for file in $text/{train,val,test_2016_flickr}.{en,de,fr}; do
    [ -f $file ] || { echo "error: $file: no such file" >&2 && exit 3; }
done
if ! python -c 'import sacremoses' 2>/dev/null; then
    echo "error: sacremoses is missing: activate the environment, or pip install sacremoses" >&2 && exit 2
fi

fit() { # CONFIG [SEED [INITIAL_MODEL [STEPS]]]
    local seed=()
    [ $# -lt 2 ] || seed=(--run-dir "runs/multi30k-$1-$2" --set "seed=$2")
    [ $# -lt 3 ] || seed+=(--set "training.init_from=runs/multi30k-$3")
    [ $# -lt 4 ] || seed+=(--set "training.max_steps=$4")
    mtrain fit "configs/multi30k/$1.yaml" ${seed[@]+"${seed[@]}"}
}

translate() { # OUTPUT INPUT OPTIONS MODEL...: with an ensemble of the models
    [ ! -e "$text/$1" ] || return 0
    local options=($3 "runs/multi30k-$4") other
    for other in "${@:5}"; do options+=(--ensemble "runs/multi30k-$other"); done
    [ ! -e "$text/$1.part" ] || options+=(--continue)
    mtrain translate ${options[@]+"${options[@]}"} -i "$text/$2" -o "$text/$1"
}

sample() { # OUTPUT INPUT SEED MODEL
    translate "$1" "$2" "--sample --top-k 10 --seed $3" "$4"
}

rerank() { # OUTPUT INPUT REVERSE MODEL...: six translations of the ensemble, reranked with REVERSE
    translate "$1.jsonl" "$2" "--beam-size 6 --n-best 6 --json" "${@:4}"
    [ ! -e "$text/$1" ] || return 0
    mtrain rerank --weight 0.07 "runs/multi30k-$3" "$text/$1.jsonl" -i "$text/$2" -o "$text/$1"
}

average() { # OUTPUT MODEL...
    [ ! -e "runs/multi30k-$1" ] || return 0
    local models=("${@:2}")
    mtrain average "${models[@]/#/runs/multi30k-}" -o "runs/multi30k-$1"
}

score() { # MODEL: its translations are written beside its folder
    local model=runs/multi30k-$1 reference=$text/test_2016_flickr.$target
    local hypotheses=$model.test_2016_flickr.$target options=()
    [ ! -e "$hypotheses.part" ] || options+=(--continue)
    mtrain translate ${options[@]+"${options[@]}"} "$model" -i $text/test_2016_flickr.en -o "$hypotheses"
    echo "$1, and the same translations lowercased and Moses-tokenized:"
    mtrain evaluate "$model" --hypotheses "$hypotheses" --reference $reference
    python scripts/score_moses.py --lang $target "$hypotheses" $reference
}

german() {
    local s n
    for s in "" 2 3; do
        fit en-de-teacher $s
        translate train.t${s:-1}.de train.en "" en-de-teacher${s:+-$s}
    done
    translate train.t123.de train.en "" en-de-teacher{,-2,-3}
    for s in "" 2 3; do fit en-de-diversified $s; done
    translate train.s123.de train.en "" en-de-diversified{,-2,-3}
    for n in 1 2; do
        sample drawn-de.$n.en train.de $n de-en
        translate drawn-de.$n.de drawn-de.$n.en "" en-de-diversified{,-2,-3}
    done
    for s in "" -2 -3; do fit en-de-sampled ${s:+${s#-} en-de-diversified$s}; done
    for n in 3 4; do
        sample drawn-de.$n.en train.de $n de-en
        rerank drawn-de.$n.de drawn-de.$n.en de-en en-de-sampled{,-2,-3}
    done
    for s in "" -2 -3; do fit en-de-reranked ${s:+${s#-} en-de-diversified$s}; done
    for n in 1 2; do rerank drawn-de.$n.again.de drawn-de.$n.en de-en en-de-reranked{,-2,-3}; done
    for s in "" -2 -3; do fit en-de-second-round ${s:+${s#-} en-de-reranked$s}; done
    for n in 5 6; do
        sample drawn-de.$n.en train.de $n de-en
        rerank drawn-de.$n.de drawn-de.$n.en de-en en-de-second-round{,-2,-3}
    done
    n=4
    for s in "" -2 -3; do
        fit en-de-third-round ${s:+${s#-} en-de-second-round$s}
        fit en-de-third-round $n en-de-second-round$s
        fit en-de-third-round $((n + 3)) en-de-second-round$s 2200
        average en-de-mean$s en-de-third-round{$s,-$n,-$((n + 3))} en-de-second-round$s
        score en-de-mean$s
        n=$((n + 1))
    done
}

french() {
    local n
    fit en-fr
    fit en-fr 2
    translate train.t1.fr train.en "" en-fr
    translate train.t2.fr train.en "" en-fr-2
    translate train.t12.fr train.en "" en-fr{,-2}
    fit en-fr-diversified
    translate train.s.fr train.en "" en-fr-diversified
    for n in 0 3; do
        sample drawn-fr.$n.en train.fr $n fr-en
        translate drawn-fr.$n.fr drawn-fr.$n.en "" en-fr-diversified
    done
    fit en-fr-sampled
    fit en-fr-pivoted
    average en-fr-mean en-fr-{pivoted,sampled,diversified}
    score en-fr-mean
}

fit de-en
fit fr-en
translate train.back.en train.de "" de-en
translate train.back-fr.en train.fr "" fr-en
if [ $target = de ]; then german; else french; fi
