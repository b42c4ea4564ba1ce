// Lists of microphones and loudspeakers, access to microphone and camera, and images as data URLs.

const KINDS = { microphone: "audioinput", loudspeaker: "audiooutput" };
const MOST_PIXELS = 1280; // per side: no model uses more

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
    throw new Error(`Browsers allow the ${name} at localhost or over https only.`);
  }
  try {
    const stream = await navigator.mediaDevices.getUserMedia(asked);
    stream.getTracks().forEach((track) => track.addEventListener("ended", onLost));
    return stream;
  } catch (error) {
    const why = {
      NotAllowedError: `The ${name} was not allowed`,
      NotFoundError: `No ${name} found`,
      OverconstrainedError: `The chosen ${name} is gone`,
    };
    const found = why[error.name] ?? `The ${name} can't be opened: ${error.message}`;
    throw new Error(`${found}. You can type instead.`);
  }
}

export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const url = dataUrl(bitmap, bitmap.width, bitmap.height);
  bitmap.close();
  return url;
}

export class Camera {
  // video: element that shows what it sees. onLost(): called when the device is gone.
  constructor(video, onLost) {
    Object.assign(this, { video, onLost });
  }

  // Ask the user for the camera and open it. Throws an Error with words for the user.
  async open() {
    const asked = { video: { width: { ideal: 640 }, facingMode: "environment" } };
    this.stream = await device("camera", asked, this.onLost);
    this.video.srcObject = this.stream;
    this.video.hidden = false;
    await this.video.play();
  }

  get sees() {
    return this.video.videoWidth > 0;
  }

  frame() {
    return dataUrl(this.video, this.video.videoWidth, this.video.videoHeight);
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.video.srcObject = null;
    this.video.hidden = true;
  }
}

function dataUrl(source, width, height) {
  const scale = Math.min(1, MOST_PIXELS / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG would make transparent pixels black
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
