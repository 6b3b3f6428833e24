// What torch asks a CUDA device for in C++: that it is there, its guard, streams, events, pinned
// memory and a generator. Whoever follows the order is told by callbacks (building.py compiles it).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int64_t ALL = -1;  // instead of the number of a stream
constexpr size_t PAGE = 4096;

struct Callbacks {
  void (*record)(int64_t event, int64_t stream);
  void (*block)(int64_t event, int64_t stream);
  void (*await_event)(int64_t event);
  void (*await_stream)(int64_t stream);
  int (*has_happened)(int64_t event);
  void (*pinned)(int64_t address, int64_t nbytes);
};
Callbacks told{};

thread_local int64_t current = 0;
std::atomic<int64_t> streams{0};
std::atomic<int64_t> events{0};

Stream stream_of(int64_t id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), id);
}

int64_t number_of(void* event) { return reinterpret_cast<int64_t>(event); }

// One device, number 0; streams are numbers, and 0 is the default one.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(++streams); }
  Stream exchangeStream(Stream stream) const override {
    int64_t before = current;
    current = stream.id();
    return stream_of(before);
  }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++events);
    if (told.record) told.record(number_of(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (told.block && event) told.block(number_of(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !told.has_happened || !event || told.has_happened(number_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (told.await_event && event) told.await_event(number_of(event));
  }
  void synchronizeStream(const Stream& stream) const override {
    if (told.await_stream) told.await_stream(stream.id());
  }
  void synchronizeDevice(DeviceIndex) const override {
    if (told.await_stream) told.await_stream(ALL);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::mutex lock;
std::map<const char*, size_t> pinned;  // bytes by address

// Freed since somebody asked. Python is not called for it, as a destructor may run while a Python
// exception is on its way, which it would lose.
std::deque<int64_t> let_go;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto* address = static_cast<const char*>(pointer);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  auto found = std::prev(after);
  return address < found->first + found->second;
}

// Rounds up to a power of two and starts on a page, as CUDA's own does.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    size_t size = 64;
    while (size < nbytes) size *= 2;
    auto* address = static_cast<char*>(std::aligned_alloc(size < PAGE ? 64 : PAGE, size));
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned[address] = size;
    }
    if (told.pinned) told.pinned(reinterpret_cast<int64_t>(address), size);
    return {address, address, &release, Device(DeviceType::CPU)};
  }
  static void release(void* address) {
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned.erase(static_cast<char*>(address));
      let_go.push_back(reinterpret_cast<int64_t>(address));
    }
    std::free(address);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};
PinnedAllocator pinned_allocator;

at::Generator new_generator() {
  return at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom());
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static at::Generator generator = new_generator();
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

extern "C" {
void follow(const Callbacks* callbacks) { told = *callbacks; }
int64_t current_stream() { return current; }
int64_t exchange_stream(int64_t id) {
  int64_t before = current;
  current = id;
  return before;
}
int64_t new_stream() { return ++streams; }
void release(void* managed) {  // the deleter of a DLManagedTensor
  std::lock_guard<std::mutex> guard(lock);
  let_go.push_back(reinterpret_cast<int64_t>(managed));
}
int64_t next_released() {
  std::lock_guard<std::mutex> guard(lock);
  if (let_go.empty()) return 0;
  int64_t first = let_go.front();
  let_go.pop_front();
  return first;
}
}
