#!/usr/bin/env bash
# The demonstrations that training works: makes their models, trains over seeds, draws docs/demos/*.png, prints a table.
#
#   scripts/demos.sh                       all three, seeds 0 1 2
#   scripts/demos.sh arithmetic            SmolLM2-135M learns to add, with a second try after feedback
#   scripts/demos.sh color_square          a tiny VLM learns to see, two squares an episode
#   scripts/demos.sh credit                credit by turn against credit by outcome
#   SEEDS="0" scripts/demos.sh credit      one seed
#
# Runs go to runs/demos, a folder for each; what is there is not trained again. What the curves are drawn of is kept in docs/demos.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
read -ra seeds <<<"${SEEDS:-0 1 2}"
out=${OUT:-runs/demos}

# train NAME SEED SPEC [--set ...]: one training, into its own folder.
train() {
  local name=$1 seed=$2 spec=$3
  shift 3
  local folder=$out/$name-$seed
  if [ -f "$folder/done" ]; then
    echo "$name, seed $seed: is there already"
    return
  fi
  rm -rf "$folder"
  echo "$name, seed $seed"
  engine train "$spec" --out "$folder" --set "train.seed=$seed" --set "rollout.seed=$seed" "$@"
  python scripts/demo_report.py keep "$folder" "docs/demos/$name-$seed.jsonl"
  touch "$folder/done"
}

arithmetic() {
  for seed in "${seeds[@]}"; do train arithmetic "$seed" specs/train_arithmetic.yaml; done
}

color_square() {
  for seed in "${seeds[@]}"; do
    local model=$out/models/tiny-vlm-$seed
    [ -d "$model" ] || python scripts/make_tiny_vlm.py "$model" --teach 150 --right 0.4 --seed "$seed"
    train color_square "$seed" specs/train_color_square.yaml --set "model.path=$model"
  done
}

credit() {
  for seed in "${seeds[@]}"; do
    local model=$out/models/tiny-lm-$seed
    [ -d "$model" ] || python scripts/make_tiny_lm.py "$model" --teach 200 --seed "$seed"
    train credit-turn "$seed" specs/train_credit.yaml --set "model.path=$model"
    train credit-outcome "$seed" specs/train_credit.yaml --set "model.path=$model" \
      --set 'rewards.credit={method: outcome}'
  done
}

case ${1:-all} in
  all) arithmetic && color_square && credit ;;
  arithmetic | color_square | credit) "$1" ;;
  *) echo "write $0 [arithmetic | color_square | credit]" >&2 && exit 2 ;;
esac
python scripts/demo_report.py draw docs/demos
