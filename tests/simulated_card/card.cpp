// Simulated cards: a device type on PyTorch's PrivateUse1 hooks, whose operators are the CPU's on the same memory.
//
// As on an accelerator, and unlike on a CPU:
// - memory is counted for each card, each has a generator of its own, and autograd has a thread for each,
// - operands on two cards, or on a card and the CPU, raise,
// - what was given to a stream without blocking (copies between pinned memory and a card, or between cards on streams of
//   their own) happens only when something is run on that stream, or it is waited for; so a wait that was forgotten shows
//   every time,
// - each stream has a virtual clock: an operator takes what a table says, a copy between cards holds both streams, and
//   what the host waits for moves the host's clock.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;

constexpr auto CARD = c10::DeviceType::PrivateUse1;
constexpr int MOST = 8;
constexpr size_t CAPACITY = size_t(4) << 30;

int count_of_cards() {
  static const int count = [] {
    const char* said = std::getenv("SIMULATED_CARDS");
    return said == nullptr ? 2 : std::min(MOST, std::max(0, std::atoi(said)));
  }();
  return count;
}

thread_local DeviceIndex current_card = 0;
thread_local c10::StreamId current_stream[MOST] = {};

Stream stream_of(DeviceIndex card) {
  return Stream(Stream::UNSAFE, Device(CARD, card), current_stream[card]);
}

// ---- what is counted ------------------------------------------------------------------------------------------------

struct Counts {
  std::atomic<int64_t> host_reads{0};      // a value was asked for: `item()`, `bool()`
  std::atomic<int64_t> waits{0};           // the host waited for a stream, a card or an event
  std::atomic<int64_t> blocking_copies{0}; // between a card and the CPU, where the host waits
  std::atomic<int64_t> copies{0};          // without that
  std::atomic<int64_t> crossings{0};       // between cards
  std::atomic<int64_t> operators{0};       // that a card was given, but for copies and views
} counts;

// ---- streams, their queues and clocks -------------------------------------------------------------------------------

std::recursive_mutex lock; // of all that is below
int64_t depth = 0;         // how often its holder has it
std::vector<std::function<void()>> finished; // their tensors may need Python's lock to be freed, so after this one's release

struct Lock {
  explicit Lock(std::recursive_mutex&) {
    lock.lock();
    depth++;
  }
  ~Lock() {
    if (--depth == 0) {
      freed.swap(finished);
    }
    lock.unlock();
  }
  std::vector<std::function<void()>> freed;
};

struct Queue {
  double clock = 0;
  int64_t given = 0, done = 0;
  std::vector<std::function<void()>> pending;

  void give(std::function<void()> work) {
    given++;
    pending.push_back(std::move(work));
  }

  // What was given first, up to number `until`.
  void run(int64_t until) {
    while (done < std::min(until, given)) {
      auto work = std::move(pending.front());
      pending.erase(pending.begin());
      done++;
      work();
      finished.push_back(std::move(work));
    }
  }
};

std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
std::map<std::string, double> costs;
double host_clock = 0; // of the thread that is furthest

Queue& queue_of(const Stream& stream) {
  return queues[{stream.device_index(), stream.id()}];
}

Queue& here(DeviceIndex card) {
  return queue_of(stream_of(card));
}

double cost_of(const std::string& name) {
  auto found = costs.find(name);
  return found == costs.end() ? 0.0 : found->second;
}

// The host's work begins no stream's before it was given.
void spend(Queue& queue, double seconds) {
  queue.clock = std::max(queue.clock, host_clock) + seconds;
}

void wait_for(Queue& queue) {
  queue.run(queue.given);
  host_clock = std::max(host_clock, queue.clock);
}

void wait_for_card(DeviceIndex card) {
  Lock held(lock);
  counts.waits++;
  for (auto& [key, queue] : queues) {
    if (key.first == card) {
      wait_for(queue);
    }
  }
}

struct Event {
  DeviceIndex card = 0;
  c10::StreamId stream = 0;
  int64_t number = 0;
  double clock = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return CARD;
  }
  Device exchangeDevice(Device device) const override {
    Device before(CARD, current_card);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(CARD, current_card);
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count_of_cards(), "there is no card ", int(device.index()));
    if (device.index() >= 0) {
      current_card = device.index();
    }
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) {
      current_card = device.index();
    }
  }
  Stream getStream(Device device) const override {
    return stream_of(device.index() < 0 ? current_card : device.index());
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(CARD, device.index() < 0 ? current_card : device.index()), 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{1};
    return Stream(Stream::UNSAFE, Device(CARD, device.index() < 0 ? current_card : device.index()), next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return count_of_cards();
  }
  bool queryStream(const Stream& stream) const override {
    Lock held(lock);
    auto& queue = queue_of(stream);
    return queue.done == queue.given;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock held(lock);
    counts.waits++;
    wait_for(queue_of(stream));
  }
  void synchronizeDevice(const DeviceIndex card) const override {
    wait_for_card(card < 0 ? current_card : card);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock held(lock);
    if (*event == nullptr) {
      *event = new Event();
    }
    auto& queue = queue_of(stream);
    *static_cast<Event*>(*event) = {stream.device_index(), stream.id(), queue.given, std::max(queue.clock, host_clock)};
  }
  void block(void* event, const Stream& stream) const override {
    Lock held(lock);
    if (auto* its = static_cast<Event*>(event)) {
      queues[{its->card, its->stream}].run(its->number);
      auto& queue = queue_of(stream);
      queue.clock = std::max(queue.clock, its->clock);
    }
  }
  bool queryEvent(void* event) const override {
    Lock held(lock);
    auto* its = static_cast<Event*>(event);
    return its == nullptr || queues[{its->card, its->stream}].done >= its->number;
  }
  void synchronizeEvent(void* event) const override {
    Lock held(lock);
    counts.waits++;
    if (auto* its = static_cast<Event*>(event)) {
      queues[{its->card, its->stream}].run(its->number);
      host_clock = std::max(host_clock, its->clock);
    }
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(second)->clock - static_cast<Event*>(first)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory ---------------------------------------------------------------------------------------------------------

int64_t held_bytes[MOST] = {}, peak_bytes[MOST] = {};

struct Block {
  c10::DataPtr memory; // of the CPU's allocator
  DeviceIndex card;
  size_t bytes;

  Block(c10::DataPtr memory, DeviceIndex card, size_t bytes) : memory(std::move(memory)), card(card), bytes(bytes) {
    Lock held(lock);
    held_bytes[card] += bytes;
    peak_bytes[card] = std::max(peak_bytes[card], held_bytes[card]);
  }
  ~Block() {
    Lock held(lock);
    held_bytes[card] -= bytes;
  }
};

void free_block(void* block) {
  delete static_cast<Block*>(block);
}

// Memory of the CPU as memory of a card.
c10::DataPtr on_card(c10::DataPtr memory, DeviceIndex card, size_t bytes) {
  void* data = memory.get();
  auto* block = new Block(std::move(memory), card, bytes);
  return {data, block, &free_block, Device(CARD, card)};
}

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(
        OutOfMemoryError, held_bytes[current_card] + bytes <= CAPACITY, "card ", int(current_card), " is out of memory");
    return on_card(c10::GetCPUAllocator()->allocate(bytes), current_card, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex card) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* of : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*of)[0].current = held_bytes[card];
      (*of)[0].peak = peak_bytes[card];
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex card) override {
    peak_bytes[card] = held_bytes[card];
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex card) override {
    return {CAPACITY - held_bytes[card], CAPACITY};
  }
};

CardAllocator allocator;
REGISTER_ALLOCATOR(CARD, &allocator);

// Memory of the CPU that is pinned: known by its address.
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    Lock held(lock);
    pinned[data] = std::max<size_t>(bytes, 1);
    return {data, data, &unpin, Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* data) {
    Lock held(lock);
    pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  Lock held(lock);
  auto* place = static_cast<const char*>(data);
  auto next = pinned.upper_bound(place);
  return next != pinned.begin() && place < std::prev(next)->first + std::prev(next)->second;
}

// ---- random numbers -------------------------------------------------------------------------------------------------

// A generator of a card, which holds one of the CPU.
struct CardGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit CardGenerator(DeviceIndex card, at::Generator inner)
      : GeneratorImpl(Device(CARD, card), DispatchKeySet(DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override {
    return new CardGenerator(device().index(), inner.clone());
  }
};

at::Generator new_generator(DeviceIndex card) {
  return at::make_generator<CardGenerator>(card, at::detail::createCPUGenerator());
}

const at::Generator& generator_of(DeviceIndex card) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MOST; i++) {
      made.push_back(new_generator(i));
    }
    return made;
  }();
  return all.at(card < 0 ? current_card : card);
}

const at::Generator& inner_of(const at::Generator& generator) {
  return static_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count_of_cards() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return count_of_cards();
  }
  void setCurrentDevice(DeviceIndex card) const override {
    Guard().setDevice(Device(CARD, card));
  }
  DeviceIndex getCurrentDevice() const override {
    return current_card;
  }
  DeviceIndex exchangeDevice(DeviceIndex card) const override {
    return Guard().exchangeDevice(Device(CARD, card)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex card) const override {
    return exchangeDevice(card);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(CARD, current_card);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex card) const override {
    return generator_of(card);
  }
  at::Generator getNewGenerator(DeviceIndex card) const override {
    return new_generator(card < 0 ? current_card : card);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    std::memcpy(memory.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(on_card(std::move(memory), storage.device().index(), bytes));
    impl->set_nbytes(bytes);
  }
};

// ---- tensors of a card as the CPU's, and back -----------------------------------------------------------------------

at::Tensor with_layout_of(const at::Tensor& of, Storage storage, DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, of.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(of.storage_offset());
  impl->set_sizes_and_strides(of.sizes(), of.strides());
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (of.is_conj()) {
    made._set_conj(true);
  }
  if (of.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

// One call of an operator: what its tensors of cards are on the CPU.
struct Call {
  struct Pair {
    at::Tensor card, cpu;
  };
  std::vector<Pair> tensors;
  std::vector<std::pair<Storage, Storage>> storages; // of the card, of the CPU
  DeviceIndex card = -1;
  bool host_tensor = false;

  Storage cpu_storage(const Storage& its) {
    for (auto& [card_storage, cpu] : storages) {
      if (card_storage.unsafeGetStorageImpl() == its.unsafeGetStorageImpl()) {
        return cpu;
      }
    }
    auto* impl = its.unsafeGetStorageImpl();
    auto made = c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(),
        impl->nbytes(),
        c10::DataPtr(impl->mutable_data(), Device(c10::DeviceType::CPU)),
        c10::GetCPUAllocator(),
        true);
    storages.emplace_back(its, Storage(made));
    return storages.back().second;
  }

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != CARD) {
      host_tensor |= tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(
        card == -1 || card == tensor.device().index(),
        "Expected all tensors to be on the same device, but found at least two devices, card:",
        int(card),
        " and card:",
        int(tensor.device().index()));
    card = tensor.device().index();
    for (auto& pair : tensors) {
      if (pair.card.is_same(tensor)) {
        return pair.cpu;
      }
    }
    auto cpu = with_layout_of(tensor, cpu_storage(tensor.storage()), DispatchKeySet(DispatchKey::CPU));
    tensors.push_back({tensor, cpu});
    return cpu;
  }

  at::Tensor to_card(const at::Tensor& cpu) {
    if (!cpu.defined() || cpu.layout() != c10::kStrided || cpu.device().type() != c10::DeviceType::CPU) {
      return cpu;
    }
    for (auto& pair : tensors) {
      if (pair.cpu.is_same(cpu)) {
        return pair.card;
      }
    }
    Storage storage;
    for (auto& [card_storage, cpu_storage] : storages) {
      if (cpu_storage.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
        storage = card_storage;
      }
    }
    if (!storage) { // new memory, which becomes the card's
      auto* impl = cpu.storage().unsafeGetStorageImpl();
      auto bytes = impl->nbytes();
      auto owner = std::make_unique<Storage>(cpu.storage());
      void* data = impl->mutable_data();
      c10::DataPtr memory(
          data, owner.release(), [](void* held) { delete static_cast<Storage*>(held); }, Device(c10::DeviceType::CPU));
      storage = Storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), bytes, on_card(std::move(memory), card, bytes), &allocator, true));
      storages.emplace_back(storage, cpu.storage());
    }
    auto made = with_layout_of(cpu, storage, DispatchKeySet(DispatchKey::PrivateUse1));
    return made;
  }

  IValue each(const IValue& value, at::Tensor (Call::*of)(const at::Tensor&)) {
    if (value.isTensor()) {
      return (this->*of)(value.toTensor());
    }
    if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        tensor = (this->*of)(tensor);
      }
      return IValue(std::move(list));
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        made.push_back(tensor ? std::optional<at::Tensor>((this->*of)(*tensor)) : std::nullopt);
      }
      return IValue(std::move(made));
    }
    return value;
  }

  // What an operator has resized, or given another memory, is so on the card.
  void follow() {
    for (auto& [card_storage, cpu] : storages) {
      auto* its = card_storage.unsafeGetStorageImpl();
      auto* impl = cpu.unsafeGetStorageImpl();
      if (impl->data() != its->data() || impl->nbytes() != its->nbytes()) {
        auto bytes = impl->nbytes();
        void* data = impl->mutable_data();
        auto owner = std::make_unique<Storage>(cpu);
        c10::DataPtr memory(
            data, owner.release(), [](void* held) { delete static_cast<Storage*>(held); }, Device(c10::DeviceType::CPU));
        its->set_data_ptr_noswap(on_card(std::move(memory), its->device().index(), bytes));
        its->set_nbytes(bytes);
      }
    }
    for (auto& pair : tensors) {
      if (pair.card.sizes() != pair.cpu.sizes() || pair.card.strides() != pair.cpu.strides()) {
        pair.card.unsafeGetTensorImpl()->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides());
      }
    }
  }
};

bool may_mix(const std::string& name) {
  // Those that take indices, or sizes, on the CPU, as on accelerators.
  static const std::vector<std::string> some = {"aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put"};
  return std::any_of(some.begin(), some.end(), [&](auto& one) { return name.rfind(one, 0) == 0; });
}

// An operator is given to a card's current stream.
void began(DeviceIndex card, const std::string& name) {
  Lock held(lock);
  auto& queue = here(card);
  queue.run(queue.given);
  spend(queue, cost_of(name));
  counts.operators++;
}

std::mutex drawing; // of operators that draw from the CPU's generator for a card

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto size = schema.arguments().size();
  const auto begin = stack->size() - size;
  const auto name = c10::toString(op.operator_name());
  Call call;
  std::optional<at::Generator> own;
  bool takes_generator = false;
  Device place(CARD, -1);
  for (size_t i = 0; i < size; i++) {
    auto& value = (*stack)[begin + i];
    value = call.each(value, &Call::to_cpu);
    if (value.isDevice() && value.toDevice().type() == CARD) {
      place = value.toDevice();
      value = Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator()) {
      own = value.toGenerator();
      value = inner_of(*own);
    }
  }
  if (call.card == -1) {
    call.card = place.index() < 0 ? current_card : place.index();
  }
  TORCH_CHECK(
      !call.host_tensor || may_mix(name),
      name,
      ": Expected all tensors to be on the same device, but found at least two devices, card:",
      int(call.card),
      " and cpu");
  const bool draws = op.hasKernelForDispatchKey(DispatchKey::CPU) &&
      std::any_of(op.getTags().begin(), op.getTags().end(), [](auto tag) {
                       return tag == at::Tag::nondeterministic_seeded;
                     });
  if (draws && !own) {
    for (size_t i = 0; i < size; i++) {
      if (schema.arguments()[i].name() == "generator" && (*stack)[begin + i].isNone()) {
        (*stack)[begin + i] = inner_of(generator_of(call.card));
        takes_generator = true;
      }
    }
  }
  bool is_view = false;
  for (const auto& given : schema.returns()) {
    is_view |= given.alias_info() != nullptr && !given.alias_info()->isWrite();
  }
  if (!is_view) {
    began(call.card, op.operator_name().name);
  }
  const auto cpu_keys = DispatchKeySet(DispatchKey::CPU);
  if (draws && !own && !takes_generator) { // it draws from the CPU's own
    std::lock_guard<std::mutex> alone(drawing);
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    at::Generator mine = inner_of(generator_of(call.card));
    auto before = cpu.get_state();
    cpu.set_state(mine.get_state());
    op.redispatchBoxed(cpu_keys, stack);
    mine.set_state(cpu.get_state());
    cpu.set_state(before);
  } else {
    op.redispatchBoxed(cpu_keys, stack);
  }
  call.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    (*stack)[i] = call.each((*stack)[i], &Call::to_card);
  }
}

// ---- operators of a card's own --------------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::impl::VirtualGuardImpl guard(CARD);
  const auto card = device && device->index() >= 0 ? device->index() : current_card;
  const auto before = guard.exchangeDevice(Device(CARD, card));
  auto made = at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
  guard.setDevice(before);
  return made;
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::impl::VirtualGuardImpl guard(CARD);
  const auto card = device && device->index() >= 0 ? device->index() : current_card;
  const auto before = guard.exchangeDevice(Device(CARD, card));
  auto made = at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
  guard.setDevice(before);
  return made;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return tensor.device().type() == CARD ? Call().to_cpu(tensor) : tensor;
}

bool on_own_stream(Device device) {
  return stream_of(device.index()).id() != 0;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool from_card = from.device().type() == CARD, to_card = to.device().type() == CARD;
  auto work = [from, to] { cpu_alias(to).copy_(cpu_alias(from)); };
  Lock held(lock);
  if (from_card && to_card) {
    auto& source = here(from.device().index());
    auto& target = here(to.device().index());
    source.run(source.given);
    target.run(target.given);
    if (from.device() != to.device()) {
      counts.crossings++;
      source.clock = target.clock = std::max(source.clock, target.clock); // it holds both
    }
    spend(target, cost_of("copy"));
    source.clock = from.device() == to.device() ? source.clock : target.clock;
    if (from.device() != to.device() && on_own_stream(from.device()) && on_own_stream(to.device())) {
      auto once = [work, done = std::make_shared<bool>(false)] {
        if (!std::exchange(*done, true)) {
          work();
        }
      };
      if (to.is_floating_point()) {
        cpu_alias(to).fill_(NAN);
      }
      source.give(once);
      target.give(once);
    } else {
      work();
    }
    return to;
  }
  const auto& host = from_card ? to : from;
  auto& queue = here((from_card ? from : to).device().index());
  spend(queue, cost_of("copy"));
  if (non_blocking && is_pinned(host.storage().data())) {
    counts.copies++;
    queue.give(work);
  } else {
    counts.blocking_copies++;
    wait_for(queue);
    work();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Lock held(lock);
  counts.host_reads++;
  wait_for(here(tensor.device().index()));
  return cpu_alias(tensor).item();
}

bool is_pinned_tensor(const at::Tensor& tensor, std::optional<Device>) {
  return tensor.device().type() == c10::DeviceType::CPU && is_pinned(tensor.storage().data());
}

at::Tensor pin_memory(const at::Tensor& tensor, std::optional<Device>) {
  auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
  auto storage = Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), bytes, pinned_allocator.allocate(bytes), &pinned_allocator, false));
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  made.copy_(tensor);
  return made;
}

at::Tensor& set_storage(
    at::Tensor& tensor, Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, Storage storage) {
  int64_t size = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  auto none = empty({0}, tensor.scalar_type(), {}, tensor.device(), {}, {});
  return set_storage(tensor, none.storage(), 0, {0}, {1});
}

void record_stream(at::Tensor&, Stream) {}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Call call;
  const auto data = call.to_cpu(input), kernel = call.to_cpu(weight), added = call.to_cpu(bias.value_or(at::Tensor()));
  began(call.card, "aten::convolution");
  return call.to_card(at::convolution_symint(
      data, kernel, added, stride, padding, dilation, transposed, output_padding, std::move(groups)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> mask) {
  Call call;
  const auto g = call.to_cpu(gradient), data = call.to_cpu(input), kernel = call.to_cpu(weight);
  began(call.card, "aten::convolution_backward");
  const auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  const auto sizes = std::vector<c10::SymInt>{channels};
  auto made = at::convolution_backward_symint(
      g, data, kernel, sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.to_card(std::get<0>(made)), call.to_card(std::get<1>(made)), call.to_card(std::get<2>(made))};
}

// (0 is the mathematical one: the others are kernels of devices.)
int64_t attention_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& of_input,
    const at::Tensor& of_hidden,
    const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto gates = with_bias(of_input, input_bias) + with_bias(of_hidden, hidden_bias);
  auto four = gates.chunk(4, 1);
  auto next = four[1].sigmoid() * cell + four[0].sigmoid() * four[2].tanh();
  return {four[3].sigmoid() * next.tanh(), next, gates.detach()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& of_input,
    const at::Tensor& of_hidden,
    const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto i = with_bias(of_input, input_bias).chunk(3, 1), h = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  auto kept = (i[1] + h[1]).sigmoid();
  auto made = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {made + kept * (hidden - made), of_input.detach()};
}

// ---- what tests ask for ---------------------------------------------------------------------------------------------

int64_t count_of(const std::string& what) {
  const std::map<std::string, std::atomic<int64_t>*> all = {
      {"host_reads", &counts.host_reads},
      {"waits", &counts.waits},
      {"blocking_copies", &counts.blocking_copies},
      {"copies", &counts.copies},
      {"crossings", &counts.crossings},
      {"operators", &counts.operators}};
  return all.at(what)->load();
}

// A card's memory as a tensor of the CPU, once what was given to the card's stream is done.
at::Tensor memory_of(const at::Tensor& tensor) {
  Lock held(lock);
  auto& queue = here(tensor.device().index());
  queue.run(queue.given);
  return cpu_alias(tensor.detach());
}

void set_cost(const std::string& name, double seconds) {
  Lock held(lock);
  costs[name] = seconds;
}

double clock_of(int64_t card) {
  Lock held(lock);
  if (card < 0) {
    return host_clock;
  }
  double latest = 0;
  for (auto& [key, queue] : queues) {
    latest = key.first == card ? std::max(latest, queue.clock) : latest;
  }
  return latest;
}

void reset_clocks() {
  Lock held(lock);
  for (auto& [key, queue] : queues) {
    queue.clock = 0;
  }
  host_clock = 0;
}

at::Generator default_generator(int64_t card) {
  return generator_of(card);
}

} // namespace

TORCH_LIBRARY(simulated_card, m) {
  m.def("count_of(str what) -> int", &count_of);
  m.def("memory_of(Tensor card) -> Tensor", &memory_of);
  m.def("set_cost(str name, float seconds) -> ()", &set_cost);
  m.def("clock_of(int card) -> float", &clock_of);
  m.def("reset_clocks() -> ()", &reset_clocks);
  m.def("default_generator(int card) -> Generator?", &default_generator);
  m.def("device_count() -> int", []() -> int64_t { return count_of_cards(); });
  m.def("current_device() -> int", []() -> int64_t { return current_card; });
  m.def("set_device(int card) -> ()", [](int64_t card) { Guard().setDevice(Device(CARD, card)); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
}

#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // as CUDA's
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FP32)
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("is_pinned", &is_pinned_tensor);
  m.impl("_pin_memory", &pin_memory);
}

static const auto registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
