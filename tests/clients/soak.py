"""Sixteen clients of talon serve with words and lengths of their own, whole and streamed, one in five hanging up early: every
answer must be the one that the client gets alone. Exit code 1 if one is not, or if a client gets none.

usage: soak.py TALON BACKEND ROUNDS [OPTION OF SERVE ...]
"""
import http.client
import json
import random
import subprocess
import sys
import threading
import time

CLIENTS, PORT = 16, 8123
WORDS = "whale lamp stone river cloud bread".split()
talon, backend, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
command = [talon, "serve", "--backend", backend, "--port", str(PORT), "--context", "2048"]
command += ["--parallel", "6", "--prefill-chunk", "16", *sys.argv[4:]]
server = subprocess.Popen(command, stderr=subprocess.DEVNULL)


def connect():
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)


def ask(connection, client, stream):
    text = f"My code word is {WORDS[client % 6]}{client}. " + "Please remember it. " * (client % 5)
    body = {
        "messages": [{"role": "user", "content": text + f"What is {client} + {2 * client}?"}],
        "temperature": 0,
        "max_tokens": 10 + 3 * client,
        "stream": stream,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


def whole(connection, client):
    return json.loads(ask(connection, client, False).read())["choices"][0]["message"]["content"]


def streamed(connection, client, leave_after):
    """The text, or None if it left after so many events (0: never)."""
    response, text, events = ask(connection, client, True), "", 0
    while line := response.readline():
        if b"[DONE]" in line:
            response.read()
            return text
        if line.startswith(b"data: "):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
            events += 1
            if events == leave_after:
                connection.close()
                return None
    raise EOFError("the stream ended early")


def resident_kib():
    with open(f"/proc/{server.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


counts = {"answers": 0, "wrong": 0, "left": 0}
lock = threading.Lock()


def run(client, alone):
    chance, connection = random.Random(client), connect()
    for turn in range(rounds):
        leave_after = chance.randint(1, 6) if chance.random() < 0.2 else 0
        if leave_after or turn % 2:
            answer = streamed(connection, client, leave_after)
        else:
            answer = whole(connection, client)
        with lock:
            counts["left" if answer is None else "answers"] += 1
            counts["wrong"] += answer is not None and answer != alone
        connection = connect() if answer is None else connection


for _ in range(300):
    try:
        connection = connect()
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            break
    except OSError:
        pass
    time.sleep(0.1)
alone = [whole(connect(), client) for client in range(CLIENTS)]
before, begun = resident_kib(), time.time()
threads = [threading.Thread(target=run, args=(client, alone[client])) for client in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.time() - begun
print(f"{backend}: {rounds} rounds of {CLIENTS} clients in {seconds:.0f} s: {counts}; "
      f"resident KiB {before} before, {resident_kib()} after")
server.terminate()
code = server.wait(timeout=30)
# A client that got no answer has ended with a message above.
complete = counts["answers"] + counts["left"] == rounds * CLIENTS
sys.exit(not complete or counts["wrong"] > 0 or code != 0)
