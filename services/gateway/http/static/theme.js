// The theme, set before the first paint: as the system has it, unless the user has chosen.
"use strict";

(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is off: the system's theme it is.
  }
})();
