"""Load figures of `talon serve` with the demo model: python load.py target/release/talon

Clients on this box ask short questions, greedy and streamed, one after the other. Only the standard
library, so that it runs anywhere.
"""

import http.client
import json
import subprocess
import sys
import threading
import time

REQUESTS = 400
WORDS = ["happy", "whale", "river", "music", "table", "green", "storm", "bread"]


def start(binary):
    server = subprocess.Popen(
        [binary, "serve", "--port", "0", "--parallel", "16", "--backend", "cpu"],
        stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if " at http://" in line:
            return server, line.split(" at http://")[1].split(" ")[0]
    raise SystemExit("talon serve did not start")


def ask(connection, question):
    """Seconds to the first text, seconds in all, tokens."""
    body = {
        "messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    first, tokens = None, 0
    for line in reply:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begun
            tokens = event.get("usage", {}).get("completion_tokens", tokens)
    return first, time.perf_counter() - begun, tokens


def run(address, clients):
    questions = [
        f'Define "{WORDS[i % 8]}".' if i % 2 else f"What is {i % 89} + {i % 71}?"
        for i in range(REQUESTS)]
    results, lock = [], threading.Lock()

    def client():
        connection = http.client.HTTPConnection(address)
        while True:
            with lock:
                if not questions:
                    return
                question = questions.pop()
            result = ask(connection, question)
            with lock:
                results.append(result)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    firsts = sorted(first for first, _, _ in results if first is not None)
    percentile = lambda share: 1e3 * firsts[min(len(firsts) - 1, int(share * len(firsts)))]
    tokens = sum(tokens for _, _, tokens in results)
    print(f"| {clients} | {len(results) / seconds:.1f} | {tokens / seconds:.0f} | "
          f"{percentile(0.5):.1f} | {percentile(0.99):.1f} |", flush=True)


def main():
    server, address = start(sys.argv[1])
    try:
        connection = http.client.HTTPConnection(address)
        for word in WORDS:
            ask(connection, f'Define "{word}".')
        print("| clients | requests/s | tokens/s | TTFT p50 ms | TTFT p99 ms |\n|---|---|---|---|---|")
        for clients in [1, 4, 16]:
            run(address, clients)
    finally:
        server.terminate()
        server.wait()


main()
