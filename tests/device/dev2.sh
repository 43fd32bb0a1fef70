T=/tmp/talon
for p in "What is 17 + 25?" "What is a whale?" "Write a short story about a dog and a ship."; do
 timeout 60 $T generate --backend cuda --no-think "$p" --json $OUT/c.json --logits $OUT/c.st > /dev/null; echo rc $?
 timeout 60 $T generate --backend cpu --draft none --no-think "$p" --json $OUT/p.json --logits $OUT/p.st >/dev/null; echo rc $?
 python3 -c "
import json;a=json.load(open('$OUT/c.json'));b=json.load(open('$OUT/p.json'));print(a['text'][:100]);print('same',a['tokens']==b['tokens'],len(a['tokens']));print(a['timings']['output_throughput'],b['timings']['output_throughput'])"
 python3 tests/device/compare_logits.py $OUT/c.st $OUT/p.st
done
rm -f $OUT/*.st
timeout 100 $T kernels --rows 1,4
timeout 100 $T bench --model synthetic:glm-5.2 --layers 8 --rank-slice 0/8 --backend cuda --draft none --max-tokens 64 --runs 1 2>&1 | tail -7
