// What goes with the next message: pictures, sounds and videos that were chosen, dropped or pasted, of the kinds that the
// model takes.

const $ = (id) => document.getElementById(id);

let kinds = []; // "image", "audio", "video"
let attached = []; // {kind, name, url}

export function startMedia() {
  const drop = document.querySelector("section.chat");
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    attach($("files").files);
    $("files").value = "";
  });
  $("prompt").addEventListener("paste", (event) => {
    if (attach(event.clipboardData.files)) event.preventDefault();
  });
  drop.addEventListener("dragover", (event) => {
    if (kinds.length && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  drop.addEventListener("drop", (event) => {
    if (attach(event.dataTransfer.files)) event.preventDefault();
  });
  // Which kinds the model takes; the button is there if it takes any.
  document.addEventListener("stats", ({ detail }) => {
    kinds = detail.media;
    $("files").accept = kinds.map((kind) => `${kind}/*`).join();
    $("attach").hidden = kinds.length === 0;
  });
}

// Takes those of the files that the model takes. Says whether there are any.
function attach(files) {
  const taken = [...files].filter((file) => kinds.includes(kindOf(file)));
  for (const file of taken) {
    const reader = new FileReader();
    reader.addEventListener("load", () => setMedia([...attached, { kind: kindOf(file), name: file.name, url: reader.result }]));
    reader.readAsDataURL(file);
  }
  return taken.length > 0;
}

const kindOf = (file) => file.type.split("/")[0];

export function takeMedia() {
  const taken = attached;
  setMedia([]);
  return taken;
}

export function setMedia(media) {
  attached = media;
  $("media").replaceChildren(...media.map((one) => {
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "plain";
    remove.textContent = "✕";
    remove.setAttribute("aria-label", `Remove ${one.name}`);
    remove.addEventListener("click", () => setMedia(attached.filter((other) => other !== one)));
    const item = document.createElement("li");
    item.append(shown(one), remove);
    return item;
  }));
}

// The content of a message, as the API has it.
export function contentOf(text, media) {
  if (media.length === 0) return text;
  const parts = media.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// A medium on the page.
export function shown({ kind, name, url }) {
  const element = document.createElement(kind === "image" ? "img" : kind);
  element.src = url;
  element.title = name;
  if (kind === "image") element.alt = name;
  else {
    element.controls = true;
    element.setAttribute("aria-label", name);
  }
  return element;
}
