#!/usr/bin/env bash
# All measurements of the engine on one GPU, one after another, within a time limit: JSON and pictures into OUT.
#
#   load_tests/gpu_session.sh                                   # everything, at most 50 minutes, into benchmarks/
#   OUT=/tmp/o LIMIT=600 load_tests/gpu_session.sh decode serve # some parts
#   MODEL=tiny DEVICE=cpu ADAPTERS=4 QUICK=1 load_tests/gpu_session.sh decode throughput sweep serve   # on a CPU, in minutes
#
# A part that fails or runs out of time is named at the end; the others still run. docs/benchmarks.md says what they do.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-benchmarks}
LIMIT=${LIMIT:-3000}
MODEL=${MODEL:-llama-3.1-8b}
DEVICE=${DEVICE:-auto}
ADAPTERS=${ADAPTERS:-64}
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
export OUT LIMIT MODEL DEVICE ADAPTERS PYTHON
PARTS=(decode throughput serve decode-7b sweep punica)

decode=(--device "$DEVICE" --adapters "$ADAPTERS")
throughput=(--device "$DEVICE" --model "$MODEL")
peft=(--peft 8,32)
sweep=(--sweep-adapters 1,2,8,32,100,400 --sweep-batches 8,32,128)
load=()
if [ -n "${QUICK:-}" ]; then
    decode+=(--batches 1,4 --steps 8 --warmup 1 --prompt-tokens 20)
    throughput+=(--requests 12 --lengths uniform:8:20:4:8 --max-num-seqs 8)
    peft=(--peft 2 --peft-new-tokens 4)
    sweep=(--sweep-adapters 1,2 --sweep-batches 2,4 --sweep-lengths fixed:16:8)
    load=(--requests 12 --clients 4 --lengths uniform:8:20:4:8 --token-high 500)
fi

bench() { "$PYTHON" -m app bench "$@"; }

serve() {
    local work server url= scenario=load_tests/scenarios/skewed.yaml code=0
    work=$(mktemp -d)
    "$PYTHON" -m punica_core.bench.synthetic "$work" --model "$MODEL" --adapters "$ADAPTERS" || return
    "$PYTHON" -m app serve --model "$work/$MODEL" --load-format dummy --adapters "$work/adapters" --device "$DEVICE" \
        --port 0 --max-model-len 2048 --max-num-seqs 256 --max-num-batched-tokens 2048 >"$OUT/server.log" 2>&1 &
    server=$!
    # shellcheck disable=SC2064  # the values of now
    trap "kill $server 2>/dev/null; wait $server; rm -rf '$work'" EXIT
    # Its own log says where it listens, once it is ready: another server's port cannot be taken for it.
    until url=$(grep -om1 'http://127\.0\.0\.1:[0-9]*' "$OUT/server.log"); do
        kill -0 "$server" 2>/dev/null || { tail -5 "$OUT/server.log" >&2; return 1; }
        sleep 1
    done
    bench serve "$scenario" --base-url "$url" --warmup --popularity base,identical,skewed,distinct \
        ${load[@]+"${load[@]}"} --out "$OUT/serve-$MODEL" || code=1
    [ -n "${QUICK:-}" ] || bench serve "$scenario" --base-url "$url" --popularity base,skewed --clients 256 --processes 4 --requests 1024 \
        --out "$OUT/serve-256-clients-$MODEL" || code=1
    return $code
}

run_part() {
    case $1 in
        decode) bench decode --model "$MODEL" "${decode[@]}" --out "$OUT/decode-$MODEL.json" ;;
        decode-7b) bench decode --model llama-2-7b "${decode[@]}" --out "$OUT/decode-llama-2-7b.json" ;;
        throughput)
            bench throughput "${throughput[@]}" --adapters "$ADAPTERS" "${peft[@]}" --check distinct \
                --out "$OUT/throughput-$MODEL.json" ;;
        sweep) bench throughput "${throughput[@]}" --systems "" --adapters 1 "${sweep[@]}" --out "$OUT/adapters-$MODEL.json" ;;
        punica) bench throughput --workload punica "${throughput[@]}" --out "$OUT/punica-$MODEL.json" ;;
        serve) serve ;;
        *) echo "unknown part $1; known: ${PARTS[*]}" >&2; return 2 ;;
    esac
}

if [ "${1:-}" = --part ]; then
    run_part "$2"
    exit
fi

mkdir -p "$OUT"
deadline=$((SECONDS + LIMIT))
failed=()
for part in "${@:-${PARTS[@]}}"; do
    left=$((deadline - SECONDS))
    if [ "$left" -le 0 ]; then
        failed+=("$part (no time left)")
        continue
    fi
    echo "== $part, $left s left" >&2
    # timeout signals the part's whole process group, so what it has started ends with it.
    timeout --kill-after=40 "$left" load_tests/gpu_session.sh --part "$part" || failed+=("$part")
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
