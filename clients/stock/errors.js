// SPDX-License-Identifier: Apache-2.0
// Reads every error of patchbay.v1 with the stock gRPC client of Node.js.
//
//     node errors.js PACKAGES PROTO SOCKET
//
// PACKAGES is the folder of node_modules, and PROTO the folder of the interface. A daemon listens
// on SOCKET. The monitor of its guest "refusing" refuses each call with the reason that the call
// names in place of a key.

const { createRequire } = require("node:module");
const path = require("node:path");

const [packages, proto, socket] = process.argv.slice(2);
const load = createRequire(path.join(packages, "package.json"));
const grpc = load("@grpc/grpc-js");
const protobuf = load("protobufjs");

const loaded = load("@grpc/proto-loader").loadSync(
  ["patchbay/v1/errors.proto", "patchbay/v1/static_keys.proto"],
  { includeDirs: [proto], keepCase: true, enums: String },
);
const { StaticKeysService } = grpc.loadPackageDefinition(loaded).patchbay.v1;
const reasons = loaded["patchbay.v1.ErrorReason"].type.value
  .map((value) => value.name.replace("ERROR_REASON_", ""))
  .filter((name) => name !== "UNSPECIFIED");

// The messages of google.rpc that carry error details.
const { root } = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`);
const [Status, ErrorInfo] = ["Status", "ErrorInfo"].map((name) => root.lookupType(name));

const client = new StaticKeysService(`unix:${socket}`, grpc.credentials.createInsecure());
const guest = "refusing";
const deadline = () => ({ deadline: Date.now() + 60_000 });
const unary = (method, request) =>
  new Promise((resolve) => client[method](request, deadline(), resolve));
const calls = {
  UpdateStaticKeys: (name) =>
    unary("UpdateStaticKeys", { guest, updates: [{ name, op: "KEY_OP_INC" }] }),
  GetStaticKey: (name) => unary("GetStaticKey", { guest, name }),
  WatchStaticKeys: (name) =>
    new Promise((resolve) => {
      const stream = client.WatchStaticKeys({ guest, patterns: [name] }, deadline());
      stream.on("data", () => {});
      stream.on("error", resolve);
      stream.on("end", () => resolve(null));
    }),
};

function complaint(error, reason) {
  if (!error) return "no error";
  const [details] = error.metadata.get("grpc-status-details-bin");
  if (!details) return `${error.message}, without details`;
  const status = Status.decode(details);
  const info = status.details.find((any) => any.typeUrl.endsWith("/google.rpc.ErrorInfo"));
  const { reason: found, domain, metadata } = ErrorInfo.decode(info.value);
  const message = `refused with ${reason}: “100 %”\nas asked`;
  const same =
    found === reason &&
    domain === "patchbay" &&
    metadata.near === "näher\nund näher" &&
    status.code === error.code &&
    error.details === message;
  return same ? null : JSON.stringify({ code: error.code, details: error.details, found, metadata });
}

async function main() {
  let [passed, failed] = [0, 0];
  for (const reason of reasons) {
    for (const [method, call] of Object.entries(calls)) {
      const wrong = complaint(await call(reason), reason);
      if (wrong) console.log(`${method} with ${reason}: ${wrong}`);
      wrong ? (failed += 1) : (passed += 1);
    }
  }
  client.close();
  console.log(`${passed} passed, ${failed} failed`);
}

main();
