// Microphones, loudspeakers and cameras: which there are, and asking the user for one.

const KINDS = { microphone: "audioinput", loudspeaker: "audiooutput" };

// Fill the lists of the settings. Browsers name devices once the user has allowed the microphone.
export async function listDevices() {
  const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  for (const [id, kind] of Object.entries(KINDS)) {
    const list = document.getElementById(id);
    const chosen = list.value;
    const named = found.filter((one) => one.kind === kind && one.label && one.deviceId !== "default");
    const options = named.map(({ label, deviceId }) => new Option(label, deviceId));
    list.replaceChildren(new Option("Default", ""), ...options);
    list.value = named.some(({ deviceId }) => deviceId === chosen) ? chosen : "";
  }
}

// Ask the user for a device. onLost(): called when it is gone. Throws an Error with words for the user.
export async function device(name, asked, onLost) {
  if (!navigator.mediaDevices) {
    throw new Error(`A browser gives the ${name} to pages at localhost or over https only.`);
  }
  try {
    const stream = await navigator.mediaDevices.getUserMedia(asked);
    stream.getTracks().forEach((track) => track.addEventListener("ended", onLost));
    return stream;
  } catch (error) {
    const why = {
      NotAllowedError: "it was not allowed",
      NotFoundError: "there is none",
      OverconstrainedError: "the chosen one is gone",
    };
    throw new Error(`No ${name}: ${why[error.name] ?? error.message}. You can still write.`);
  }
}
