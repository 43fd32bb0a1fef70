#!/usr/bin/env bash
# What the kernels are held to on a GPU, with the binary given: stages against the CPU backend, times of
# stages, of steps and of exchanges between ranks on one GPU, the sanitizer. Reports go to the folder given.
# usage: tests/device/kernels.sh TALON OUT
set -u
talon=$1 out=$2
full="--model synthetic:glm-5.2 --rank-slice 0/8"
echo "== stages against the CPU, demo"
timeout 120 "$talon" kernels --check --repeats 1000 --json "$out/check-demo.json"
echo "== stages against the CPU, GLM-5.2's shapes"
timeout 120 "$talon" kernels --check $full --layers 7 --repeats 50 --rows 1,4,16 --json "$out/check-glm.json"
echo "== steps of one and of four rows, 78 layers"
timeout 120 "$talon" bench $full --backend cuda --simulate-acceptance 2.6 --draft-tokens 3 \
  --max-tokens 96 --runs 6 --context 1024 --json "$out/steps.json"
echo "== stages"
timeout 60 "$talon" kernels --rows 1,2,4,8,16 --json "$out/kernels-1k.json"
echo "== stages, context 32768"
timeout 60 "$talon" kernels --rows 1,4 --context 32768 --json "$out/kernels-32k.json"
for ranks in 0,0 0,0,0,0,0,0,0,0; do
  echo "== exchanges between ranks on GPUs $ranks"
  timeout 300 "$talon" kernels --comm --devices $ranks --json "$out/comm-${#ranks}.json"
done
for tool in memcheck racecheck; do
  echo "== $tool, demo"
  # The driver is asked for one parameter more than a kernel has, which is no error here.
  sanitizer="compute-sanitizer --tool $tool --report-api-errors no"
  timeout 90 $sanitizer "$talon" generate --backend cuda --context 512 \
    --max-tokens 6 --no-think "What is a whale?" 2>&1 | tail -4
  echo "== $tool, demo on two and on eight ranks in lock-step"
  for ranks in 0,0 0,0,0,0,0,0,0,0; do
    timeout 120 $sanitizer "$talon" generate --backend cuda --devices $ranks --context 512 \
      --max-tokens 3 --no-think "What is a whale?" 2>&1 | tail -1
  done
  echo "== $tool, four layers at GLM-5.2's shapes"
  timeout 120 $sanitizer "$talon" bench $full --layers 4 --backend cuda \
    --draft none --max-tokens 3 --runs 1 --context 512 2>&1 | grep -E "=====|Error|hazard" | tail -4
done
