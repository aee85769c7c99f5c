// Storm's multilang protocol in Node.js, as little of it as a component needs: framing, handshake, sync.
"use strict";
const fs = require("fs");
const path = require("path");

let text = "";
const waiting = [];
let wake = null;

process.stdin.setEncoding("utf8");
process.stdin.on("data", (chunk) => {
  text += chunk;
  for (let at = text.indexOf("\nend\n"); at >= 0; at = text.indexOf("\nend\n")) {
    waiting.push(JSON.parse(text.slice(0, at)));
    text = text.slice(at + 5);
  }
  if (wake) wake();
});
process.stdin.on("end", () => process.exit(0));

async function read(wanted) {
  for (;;) {
    const at = waiting.findIndex((message) => wanted === undefined || Array.isArray(message) === wanted);
    if (at >= 0) return waiting.splice(at, 1)[0];
    await new Promise((resolve) => (wake = resolve));
  }
}

function send(message) {
  process.stdout.write(JSON.stringify(message) + "\nend\n");
}

async function handshake() {
  const first = await read();
  fs.writeFileSync(path.join(first.pidDir, String(process.pid)), "");
  send({ pid: process.pid });
  return first;
}

async function splitBolt() {
  const { context } = await handshake();
  process.stderr.write("a word on standard error\n");
  send({ command: "log", msg: `task ${context.taskid} of ${context.componentid} is ready`, level: 3 });
  for (;;) {
    const tup = await read(false);
    if (tup.stream === "__heartbeat") {
      send({ command: "sync" });
      continue;
    }
    if (tup.task === -1) {
      send({ command: "ack", id: tup.id });
      continue;
    }
    const sentence = tup.tuple[0];
    if (sentence === "fail me" && !fs.existsSync("failed")) {
      fs.writeFileSync("failed", "");
      send({ command: "error", msg: "this one fails" });
      send({ command: "fail", id: tup.id });
      continue;
    }
    for (const word of sentence.split(" ")) {
      send({ command: "emit", anchors: [tup.id], tuple: [word] });
      const tasks = await read(true);
      // Directly to the same task again, on the other stream; a direct emit is not answered.
      send({ command: "emit", anchors: tup.id, stream: "copies", task: tasks[0], tuple: [word, tasks.length] });
    }
    send({ command: "metrics", name: "sentences", params: 1 });
    send({ command: "nonsense", id: 1 });
    send({ command: "ack", id: tup.id });
  }
}

async function sentenceSpout() {
  const { conf } = await handshake();
  const open = new Map();
  let next = 0;
  for (;;) {
    const message = await read(false);
    if (message.command === "next" && next < conf["node.sentences"].length) {
      open.set(next, conf["node.sentences"][next]);
      send({ command: "emit", id: next, tuple: [open.get(next)] });
      fs.appendFileSync("receivers", JSON.stringify(await read(true)) + "\n");
      next += 1;
    } else if (message.command === "ack") {
      open.delete(message.id);
      fs.appendFileSync("acked", message.id + "\n");
    } else if (message.command === "fail") {
      send({ command: "emit", id: message.id, tuple: [open.get(message.id)], need_task_ids: false });
    } else if (message.command === "activate" || message.command === "deactivate") {
      fs.appendFileSync("states", message.command + "\n");
    }
    send({ command: "sync" });
  }
}

(process.argv[2] === "spout" ? sentenceSpout : splitBolt)();
