// The page: wires the chat and the live view to what surrounds them: views on a narrow screen, theme, API key.

import { Chat } from "./chat.js";
import { apiKey, setApiKey } from "./events.js";
import { Mesh } from "./mesh.js";

const byId = (id) => document.getElementById(id);

const mesh = new Mesh({ onKeyNeeded: askForKey });
const chat = new Chat({ onKeyNeeded: askForKey });
wireViews();
wireTheme();
wireKey();
mesh.start();
if (matchMedia("(min-width: 980px)").matches) byId("prompt").focus();

// On a narrow screen one view is shown at a time, chosen by tabs; arrow keys move between them.
function wireViews() {
  const tabs = [byId("tab-chat"), byId("tab-mesh")];
  const choose = (tab) => {
    document.body.dataset.view = tab.getAttribute("aria-controls");
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
    }
    mesh.drawLines();
    chat.scroll();
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - at];
      choose(other);
      other.focus();
    });
  });
}

function wireTheme() {
  const root = document.documentElement;
  const show = () => {
    byId("theme-label").textContent = `Theme: ${root.dataset.theme ?? "as the system"}`;
    mesh.drawLines();
  };
  byId("theme-button").addEventListener("click", () => {
    const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
    // First to what it is not now, then to the other, then back to the system's.
    const order = systemIsDark ? [undefined, "light", "dark"] : [undefined, "dark", "light"];
    const next = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
    try {
      if (next) localStorage.setItem("theme", next);
      else localStorage.removeItem("theme");
    } catch {
      // Storage is off: the choice holds until the page is left.
    }
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

function wireKey() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => openKeyDialog());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  byId("key-form").addEventListener("submit", () => {
    setApiKey(byId("key").value.trim());
    byId("key-button").toggleAttribute("data-set", apiKey() !== "");
    mesh.restart();
  });
  byId("key-button").toggleAttribute("data-set", apiKey() !== "");
}

function openKeyDialog(reason) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  const words = "It is kept until this tab is closed, and nowhere else.";
  byId("key-reason").textContent = reason ?? `Where this gateway asks for a key, it goes along with every request. ${words}`;
  byId("key").value = apiKey();
  dialog.showModal();
}

function askForKey(words) {
  const said = apiKey() ? `The gateway does not take this key: ${words}.` : "This gateway asks for an API key.";
  openKeyDialog(`${said} It is kept until this tab is closed, and nowhere else.`);
}
