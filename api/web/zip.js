// A zip archive of blobs as they are, without compression: pictures are compressed already.

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});
const MOST_BYTES = 0xffffffff; // of an archive without the format's 64-bit extension

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** Little-endian numbers, each as [value, bytes]. */
function numbers(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [, size]) => sum + size, 0)));
  let at = 0;
  for (const [value, size] of fields) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return view.buffer;
}

/** A time as MS-DOS has it: local, from 1980 on, in steps of two seconds. */
function stamp(ms) {
  const t = new Date(ms);
  const day = Math.max(0, t.getFullYear() - 1980) << 9 | (t.getMonth() + 1) << 5 | t.getDate();
  return [[t.getHours() << 11 | t.getMinutes() << 5 | t.getSeconds() >> 1, 2], [day, 2]];
}

/** The archive of `files`, [{name, blob, time}]; of files of one name the later ones are numbered. */
export async function zip(files) {
  const parts = [];
  const directory = [];
  const names = new Set();
  let at = 0;
  for (const { name, blob, time } of files) {
    const dot = name.lastIndexOf(".");
    let unique = name;
    for (let k = 2; names.has(unique); k++) unique = `${name.slice(0, dot)}-${k}${name.slice(dot)}`;
    names.add(unique);
    const path = new TextEncoder().encode(unique);
    const crc = crc32(new Uint8Array(await blob.arrayBuffer()));
    // Version 2.0, names in UTF-8, stored as they are.
    const shared = [[20, 2], [0x800, 2], [0, 2], ...stamp(time), [crc, 4], [blob.size, 4], [blob.size, 4], [path.length, 2], [0, 2]];
    const local = numbers([0x04034b50, 4], ...shared);
    directory.push(numbers([0x02014b50, 4], [20, 2], ...shared, [0, 2], [0, 2], [0, 2], [0, 4], [at, 4]), path);
    parts.push(local, path, blob);
    at += local.byteLength + path.length + blob.size;
  }
  const size = directory.reduce((sum, part) => sum + part.byteLength, 0);
  if (files.length > 0xffff || at + size > MOST_BYTES) throw new RangeError("More than 4 GB do not fit into one archive.");
  const end = numbers([0x06054b50, 4], [0, 2], [0, 2], [files.length, 2], [files.length, 2], [size, 4], [at, 4], [0, 2]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}
