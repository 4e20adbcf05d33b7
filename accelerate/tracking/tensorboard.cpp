// TensorBoard's event files: a sequence of {u64 length, its masked CRC-32C, an Event, its masked
// CRC-32C}, little-endian (tensorflow/core/lib/io/record_writer.h).
#include <png.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include <accelerate/tracking/tensorboard_event.pb.h>

#include <tessera/accelerate/tracking/append_file.h>
#include <tessera/accelerate/tracking/tracker.h>
#include <tessera/core/error.h>
#include <tessera/core/io/crc32c.h>

namespace tessera {
namespace {

using tensorboard::Event;
using tensorboard::Summary;

uint32_t masked_crc(const void* data, size_t bytes) {
  const uint32_t crc = crc32c(data, bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

template <class T>
void append_bytes(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

std::string to_record(const Event& event) {
  const std::string data = event.SerializeAsString();
  std::string record;
  record.reserve(data.size() + 16);
  append_bytes(record, static_cast<uint64_t>(data.size()));
  append_bytes(record, masked_crc(record.data(), sizeof(uint64_t)));
  record += data;
  append_bytes(record, masked_crc(data.data(), data.size()));
  return record;
}

// pixels: height * width * channels bytes, row by row.
std::string encode_png(const std::vector<uint8_t>& pixels, int64_t height, int64_t width,
                       int64_t channels) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = static_cast<png_uint_32>(height);
  image.width = static_cast<png_uint_32>(width);
  image.format = channels == 1 ? PNG_FORMAT_GRAY : channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string png(bytes, '\0');
  const int ok =
      png_image_write_to_memory(&image, png.data(), &bytes, 0, pixels.data(), 0, nullptr);
  TS_CHECK_AS(Error, ok, "log_images", "PNG encoding failed: ", image.message);
  png.resize(bytes);
  return png;
}

// Markdown, in which '|' parts cells and a line ends the row.
std::string markdown_cell(const std::string& text) {
  std::string cell;
  for (const char c : text) {
    if (c == '|') cell += '\\';
    cell += c == '\n' ? ' ' : c;
  }
  return cell;
}

class TensorBoardTracker : public Tracker {
 public:
  void start(const TrackerRun& run) override {
    project_ = run.project;
    started_ = unix_seconds();
    char host[256] = "localhost";
    ::gethostname(host, sizeof host - 1);
    // Of two writers within a second and a process, each has a file of its own.
    static std::atomic<int> count{0};
    char name[400];
    std::snprintf(name, sizeof name, "/events.out.tfevents.%010lld.%s.%d.%d",
                  static_cast<long long>(started_), host, static_cast<int>(::getpid()), count++);
    file_.emplace(run.folder + name, true);
    Event version;
    version.set_wall_time(started_);
    version.set_file_version("brain.Event:2");
    write(version);
    flush();
  }

  void store_configuration(const TrackedValues& configuration) override {
    TrackedTable table{{"name", "value"}, {}};
    tensorboard::HparamsPluginData plugin;
    auto& session = *plugin.mutable_session_start_info();
    session.set_group_name(project_);
    session.set_start_time_secs(started_);
    for (const auto& [name, value] : flatten(configuration)) {
      table.rows.push_back({name, to_text(value)});
      auto& hparam = (*session.mutable_hparams())[name];
      if (const auto* number = std::get_if<double>(&value)) {
        hparam.set_number_value(*number);
      } else if (const auto* integer = std::get_if<int64_t>(&value)) {
        hparam.set_number_value(static_cast<double>(*integer));
      } else if (const auto* flag = std::get_if<bool>(&value)) {
        hparam.set_bool_value(*flag);
      } else {
        hparam.set_string_value(std::get<std::string>(value));
      }
    }
    write_hparams("_hparams_/session_start_info", plugin);
    log_table("configuration", table, 0);
    flush();
  }

  void log(const TrackedValues& values, int64_t step) override {
    Event event = at(step);
    for (const auto& [name, value] : flatten(values)) {
      Summary::Value& entry = *event.mutable_summary()->add_value();
      entry.set_tag(name);
      if (const auto* text = std::get_if<std::string>(&value)) {
        set_text(entry, *text);
      } else if (const auto* number = std::get_if<double>(&value)) {
        entry.set_simple_value(static_cast<float>(*number));
      } else if (const auto* integer = std::get_if<int64_t>(&value)) {
        entry.set_simple_value(static_cast<float>(*integer));
      } else {
        entry.set_simple_value(std::get<bool>(value) ? 1 : 0);
      }
    }
    write(event);
  }

  bool log_images(const std::string& name, const Tensor& images, int64_t step) override {
    TS_CHECK_SHAPE(
        images.dim() == 4 && (images.size(3) == 1 || images.size(3) == 3 || images.size(3) == 4),
        "log_images", "expects (N, H, W, C) with 1, 3 or 4 channels; got ", images.describe(),
        "; permute or unsqueeze them.");
    TS_CHECK_DTYPE(images.dtype() == kU8 || is_floating(images.dtype()), "log_images",
                   "expects u8, or floating in [0, 1]; got ", images.describe(), ".");
    const double scale = images.dtype() == kU8 ? 1 : 255;
    const std::vector<double> values = images.to_vector();
    const int64_t count = images.size(0), height = images.size(1), width = images.size(2);
    const auto bytes = static_cast<size_t>(height * width * images.size(3));
    Event event = at(step);
    for (int64_t i = 0; i < count; ++i) {
      std::vector<uint8_t> pixels(bytes);
      for (size_t j = 0; j < bytes; ++j) {
        const double value = values[static_cast<size_t>(i) * bytes + j] * scale;
        pixels[j] = value > 0 ? static_cast<uint8_t>(std::lround(std::min(value, 255.0))) : 0;
      }
      Summary::Value& entry = *event.mutable_summary()->add_value();
      entry.set_tag(count == 1 ? name : name + "/" + std::to_string(i));
      auto& image = *entry.mutable_image();
      image.set_height(static_cast<int32_t>(height));
      image.set_width(static_cast<int32_t>(width));
      image.set_colorspace(static_cast<int32_t>(images.size(3)));
      image.set_encoded_image_string(encode_png(pixels, height, width, images.size(3)));
    }
    write(event);
    return true;
  }

  bool log_table(const std::string& name, const TrackedTable& table, int64_t step) override {
    std::string text = "|";
    for (const auto& column : table.columns) text += markdown_cell(column) + "|";
    text += "\n|";
    for (size_t i = 0; i < table.columns.size(); ++i) text += "---|";
    for (const auto& row : table.rows) {
      text += "\n|";
      for (const auto& cell : row) text += markdown_cell(cell) + "|";
    }
    Event event = at(step);
    Summary::Value& entry = *event.mutable_summary()->add_value();
    entry.set_tag(name);
    set_text(entry, text);
    write(event);
    return true;
  }

  void flush() override {
    if (!pending_.empty()) file_->write(pending_);
    pending_.clear();
    flushed_ = std::chrono::steady_clock::now();
  }

  void finish() override {
    tensorboard::HparamsPluginData plugin;
    plugin.mutable_session_end_info()->set_status(1);
    plugin.mutable_session_end_info()->set_end_time_secs(unix_seconds());
    write_hparams("_hparams_/session_end_info", plugin);
    flush();
    file_->sync();
  }

 private:
  static Event at(int64_t step) {
    Event event;
    event.set_wall_time(unix_seconds());
    event.set_step(step);
    return event;
  }

  static void set_text(Summary::Value& entry, const std::string& text) {
    entry.mutable_metadata()->mutable_plugin_data()->set_plugin_name("text");
    auto& tensor = *entry.mutable_tensor();
    tensor.set_dtype(7);
    tensor.mutable_tensor_shape()->add_dim()->set_size(1);
    tensor.add_string_val(text);
  }

  void write_hparams(const char* tag, const tensorboard::HparamsPluginData& plugin) {
    Event event = at(0);
    Summary::Value& entry = *event.mutable_summary()->add_value();
    entry.set_tag(tag);
    auto& data = *entry.mutable_metadata()->mutable_plugin_data();
    data.set_plugin_name("hparams");
    data.set_content(plugin.SerializeAsString());
    write(event);
  }

  void write(const Event& event) {
    pending_ += to_record(event);
    if (pending_.size() > (1 << 20) ||
        std::chrono::steady_clock::now() - flushed_ > std::chrono::seconds(10)) {
      flush();
    }
  }

  std::string project_;
  double started_ = 0;
  std::optional<AppendFile> file_;
  std::string pending_;
  std::chrono::steady_clock::time_point flushed_ = std::chrono::steady_clock::now();
};

}  // namespace

std::unique_ptr<Tracker> make_tensorboard_tracker() {
  return std::make_unique<TensorBoardTracker>();
}

}  // namespace tessera
