// Runs `calls` of the script before this text, and prints what each returned as one line of JSON.

function pngSize(data) {
  const bytes = Buffer.from(data);
  if (bytes.toString("latin1", 1, 4) !== "PNG") throw new Error(`not a PNG: ${bytes.subarray(0, 20)}`);
  return [bytes.readUInt32BE(16), bytes.readUInt32BE(20)];
}

const outcomes = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    outcomes[name] = { value: await call() };
  } catch (error) {
    outcomes[name] = { error: `${error.name}: ${error.message}` };
  }
}
console.log("\n" + JSON.stringify(outcomes));
