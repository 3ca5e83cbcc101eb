// libhccl.so: collectives and point-to-point between the processes of one machine, for torch_npu's own
// ProcessGroupHCCL, which finds these 28 functions with dlsym.
//
// Transport. Every ordered pair of ranks of a communicator has a Unix-domain stream socket: data flows one way, and
// acknowledgements and failure notices the other. The kernel wakes who sleeps, tells at once when a peer is gone (EOF),
// and leaves nothing behind, not even after kill -9: the sockets have abstract names, and /dev/shm is not used at all.
//
// Semantics. A call has finished when it returns, as everything on the emulator's streams has, so a missing wait() is
// not caught. Every collective synchronises: each rank tells each other what it is calling, and a rank that calls
// something else fails both, with both calls in the message. A send finishes when it was received, as on Ascend,
// whatever its size: two ranks that both send first (and not in one batch) wait for each other here too. After a
// failure a communicator stays failed.
//
// Reductions run in rank order on every rank, so that all ranks get the same bits. float16 and bfloat16 are accumulated
// in float32 and rounded once. Integers wrap. max and min propagate NaN.
//
// What is refused is what the CANN reference says that Atlas A2 (910B) refuses:
// https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/850/API/hcclapiref/hcclcpp_07_0020.html (and
// siblings). HCCL_CONNECT_TIMEOUT (120) and HCCL_EXEC_TIMEOUT (1836; 0: none) are HCCL's own limits in seconds, without
// its minimum.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <poll.h>
#include <pthread.h>
#include <set>
#include <string>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl.h"  // torch_npu's copy: the compiler checks every signature below
#include "traffic.h"

namespace {

using Clock = std::chrono::steady_clock;
using Counts = std::vector<uint64_t>;

struct Fault {
  HcclResult code;
  std::string message;
};

// ---- names and sizes

struct DataType {
  HcclDataType type;
  const char* name;
  size_t bytes;
  bool reducible;
};

const DataType& data_type(uint32_t type) {
  static constexpr DataType types[] = {
      {HCCL_DATA_TYPE_INT8, "int8", 1, true},      {HCCL_DATA_TYPE_INT16, "int16", 2, true},
      {HCCL_DATA_TYPE_INT32, "int32", 4, true},    {HCCL_DATA_TYPE_INT64, "int64", 8, true},
      {HCCL_DATA_TYPE_FP16, "float16", 2, true},   {HCCL_DATA_TYPE_BFP16, "bfloat16", 2, true},
      {HCCL_DATA_TYPE_FP32, "float32", 4, true},   {HCCL_DATA_TYPE_FP64, "float64", 8, false},
      {HCCL_DATA_TYPE_UINT8, "uint8", 1, false},   {HCCL_DATA_TYPE_UINT16, "uint16", 2, false},
      {HCCL_DATA_TYPE_UINT32, "uint32", 4, false}, {HCCL_DATA_TYPE_UINT64, "uint64", 8, false},
  };
  for (const DataType& known : types)
    if (known.type == type) return known;
  throw Fault{HCCL_E_NOT_SUPPORT, "data type " + std::to_string(type) + " is not supported on Atlas A2"};
}

const char* name_of(HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return "sum";
    case HCCL_REDUCE_PROD: return "prod";
    case HCCL_REDUCE_MAX: return "max";
    case HCCL_REDUCE_MIN: return "min";
    default: throw Fault{HCCL_E_NOT_SUPPORT, "reduce op " + std::to_string(op) + " is not supported"};
  }
}

enum class Kind : uint32_t {
  AllGather,
  AllGatherV,
  AllReduce,
  AlltoAll,
  AlltoAllV,
  Barrier,
  Broadcast,
  Reduce,
  ReduceScatter,
  ReduceScatterV,
  Scatter,
  SendRecv
};

const char* name_of(Kind kind) {
  static const char* names[] = {"AllGather", "AllGatherV", "AllReduce",     "AlltoAll",       "AlltoAllV", "Barrier",
                                "Broadcast", "Reduce",     "ReduceScatter", "ReduceScatterV", "Scatter",   "Send/Recv"};
  return names[static_cast<uint32_t>(kind)];
}

constexpr uint32_t NONE = 0xffffffff;

// What a rank tells another that it is calling; both must say the same. `count` is the caller's count; for the V calls,
// where ranks give different ones, it is the number of elements that go from the one to the other.
struct Call {
  Kind kind;
  uint32_t type;
  uint32_t op = NONE;
  uint32_t root = NONE;
  uint64_t count = 0;

  bool operator==(const Call& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root && count == other.count;
  }
  std::string text() const {
    std::string text = name_of(kind);
    if (kind == Kind::Barrier) return text;
    if (op != NONE) text += std::string("(") + name_of(HcclReduceOp(op)) + ")";
    text += " of " + std::to_string(count) + " " + data_type(type).name;
    if (root != NONE) text += " with root " + std::to_string(root);
    return text;
  }
};

// ---- communicators

struct Peer {
  int to = -1;    // data to the peer; its acknowledgements and notices come back here
  int from = -1;  // data from the peer; acknowledgements and notices go out here
  int pid = 0;
  uint32_t acknowledged = 0;
  bool gone = false;
  std::string reason;  // 'F' and why the peer left
};

struct Communicator {
  std::string name;
  uint32_t size = 0, rank = 0;
  int timeout = 0;  // seconds without progress; 0: no limit
  std::vector<Peer> peers;
  std::string failure;
  std::mutex mutex;

  std::string who(uint32_t peer) const {
    std::string text = "rank " + std::to_string(peer);
    return peers[peer].pid ? text + " (process " + std::to_string(peers[peer].pid) + ")" : text;
  }
  std::string here() const {
    return "communicator '" + name + "', rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ";
  }

  void disconnect() {
    for (Peer& peer : peers) {
      if (peer.to >= 0) close(peer.to);
      if (peer.from >= 0) close(peer.from);
      peer.to = peer.from = -1;
    }
  }
  // Tells the others why this rank leaves, then hangs up.
  void leave(const std::string& reason) {
    std::string notice = "F" + reason;
    for (Peer& peer : peers)
      if (peer.from >= 0) send(peer.from, notice.data(), notice.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    disconnect();
  }
  void fail(const std::string& reason) {
    if (!failure.empty()) return;
    failure = reason;
    leave(reason);
  }
  ~Communicator() { disconnect(); }
};

// A forked child (a DataLoader worker) must not keep its parent's sockets open: the parent's death would go unnoticed.
// Never destroyed: torch_npu destroys communicators while the process exits.
std::mutex& registry_mutex = *new std::mutex;
std::set<Communicator*>& registry = *new std::set<Communicator*>;

void disconnect_in_child() {
  for (Communicator* comm : registry) {
    comm->disconnect();
    comm->failure = "a communicator does not survive fork()";
  }
  registry_mutex.unlock();
}
const int fork_handler =
    pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); }, disconnect_in_child);

int seconds(const char* variable, int otherwise) {
  const char* value = getenv(variable);
  return value && *value ? atoi(value) : otherwise;
}

// ---- moving messages

struct Message {
  Communicator* comm;
  bool sending;
  uint32_t peer;
  Call call;
  char* data;
  size_t bytes;
  Call received = {};
  size_t moved = 0;  // bytes of the call and then of the data

  int channel() const { return sending ? comm->peers[peer].to : comm->peers[peer].from; }
  bool moved_all() const { return moved == sizeof(Call) + bytes; }
};

// Reads what the peer sent back: 'A' acknowledges one send, 'F' and the rest of the stream say why it left.
void read_notices(Peer& peer) {
  char buffer[4096];
  while (!peer.gone) {
    ssize_t n = recv(peer.to, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) peer.gone = true;
    for (ssize_t i = 0; i < n; ++i) {
      if (peer.reason.empty() && buffer[i] == 'A')
        peer.acknowledged++;
      else
        peer.reason += buffer[i];
    }
  }
}

// Only for who needs something from the peer: what it sent before it left is still there and still good.
[[noreturn]] void throw_gone(Communicator& comm, uint32_t index) {
  Peer& peer = comm.peers[index];
  read_notices(peer);
  throw Fault{HCCL_E_REMOTE, comm.here() + comm.who(index) +
                                 (peer.reason.empty() ? " is gone: its process has exited or was killed"
                                                      : " left: " + peer.reason.substr(1))};
}

// Moves what can be moved without waiting; true when the message is finished.
bool advance(Message& message, bool& progressed) {
  Communicator& comm = *message.comm;
  Peer& peer = comm.peers[message.peer];
  const size_t bytes = message.bytes, total = sizeof(Call) + bytes;
  while (message.moved < total) {
    Call& call = message.sending ? message.call : message.received;
    iovec parts[2];
    int count = 0;
    size_t in_data = 0;
    if (message.moved < sizeof(Call))
      parts[count++] = {reinterpret_cast<char*>(&call) + message.moved, sizeof(Call) - message.moved};
    else
      in_data = message.moved - sizeof(Call);
    // The receiver reads the call alone first: data of another size must not land in the buffer.
    if (in_data < bytes && (message.sending || count == 0)) parts[count++] = {message.data + in_data, bytes - in_data};
    msghdr header = {};
    header.msg_iov = parts;
    header.msg_iovlen = count;
    ssize_t n = message.sending ? sendmsg(peer.to, &header, MSG_DONTWAIT | MSG_NOSIGNAL)
                                : recvmsg(peer.from, &header, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n <= 0) throw_gone(comm, message.peer);
    progressed = true;
    const bool had_call = message.moved >= sizeof(Call);
    message.moved += n;
    if (!message.sending && !had_call && message.moved >= sizeof(Call) && !(message.received == message.call))
      throw Fault{HCCL_E_PARA, comm.here() + "mismatch: this rank calls " + message.call.text() + ", but " +
                                   comm.who(message.peer) + " calls " + message.received.text()};
  }
  if (message.moved < total) return false;
  if (message.call.kind != Kind::SendRecv) return true;
  if (!message.sending) {
    send(peer.from, "A", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return true;
  }
  read_notices(peer);
  if (!peer.acknowledged && peer.gone) throw_gone(comm, message.peer);
  if (!peer.acknowledged) return false;
  peer.acknowledged--;
  return progressed = true;
}

using Channels = std::map<int, std::deque<Message*>>;  // by socket; messages of one channel go in order

[[noreturn]] void time_out(const Channels& channels) {
  std::set<std::string> late;
  for (auto& channel : channels) late.insert(channel.second.front()->comm->who(channel.second.front()->peer));
  std::string names;
  for (const std::string& name : late) names += (names.empty() ? "" : ", ") + name;
  const Message& first = *channels.begin()->second.front();
  throw Fault{HCCL_E_TIMEOUT, first.comm->here() + first.call.text() + ": no progress for " +
                                  std::to_string(first.comm->timeout) + " s (HCCL_EXEC_TIMEOUT) while waiting for " +
                                  names};
}

void transfer(std::vector<Message>& messages) {
  Channels channels;
  for (Message& message : messages) channels[message.channel()].push_back(&message);
  auto last = Clock::now();
  while (true) {
    bool progressed = false;
    for (auto channel = channels.begin(); channel != channels.end();) {
      auto& queue = channel->second;
      while (!queue.empty() && advance(*queue.front(), progressed)) queue.pop_front();
      channel = queue.empty() ? channels.erase(channel) : std::next(channel);
    }
    if (channels.empty()) return;
    if (progressed) last = Clock::now();

    std::vector<pollfd> waiting;
    for (auto& channel : channels) {
      const Message& message = *channel.second.front();
      short events = message.sending && !message.moved_all() ? POLLOUT : POLLIN;
      waiting.push_back({channel.first, events, 0});
    }
    const int limit = channels.begin()->second.front()->comm->timeout;
    int milliseconds = -1;
    if (limit > 0) {
      auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(last + std::chrono::seconds(limit) - Clock::now());
      if (left.count() <= 0) time_out(channels);
      milliseconds = static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 30));
    }
    poll(waiting.data(), waiting.size(), milliseconds);
  }
}

// Moves messages of one or several communicators; a failure fails them all.
void exchange(std::vector<Message> messages) {
  std::set<Communicator*> comms;  // locked in address order: threads cannot wait for each other in a circle
  for (Message& message : messages) comms.insert(message.comm);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (Communicator* comm : comms) locks.emplace_back(comm->mutex);
  for (Communicator* comm : comms)
    if (!comm->failure.empty()) throw Fault{HCCL_E_INTERNAL, "the communicator failed earlier: " + comm->failure};
  try {
    transfer(messages);
  } catch (const Fault& fault) {
    for (Communicator* comm : comms) comm->fail(fault.message);
    throw;
  }
}

// ---- reductions

float bfloat16_to_float(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
uint16_t float_to_bfloat16(float value) {  // round to nearest even
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
struct BFloat16 {
  uint16_t bits;
  operator float() const { return bfloat16_to_float(bits); }
  static BFloat16 from(float value) { return {float_to_bfloat16(value)}; }
};

template <class T>
T round_to(float value) {
  return static_cast<T>(value);
}
template <>
BFloat16 round_to<BFloat16>(float value) {
  return BFloat16::from(value);
}
template <class T>
T round_to(T value) {
  return value;
}

// T is stored, A is accumulated in; both are the same for integers (A unsigned, so that overflow wraps) and float32.
template <class T, class A, class Combine>
void reduce_with(char* out, const std::vector<const char*>& inputs, size_t count, Combine combine) {
  constexpr size_t BLOCK = 2048;
  A total[BLOCK];
  for (size_t start = 0; start < count; start += BLOCK) {
    const size_t n = std::min(BLOCK, count - start);
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const T* input = reinterpret_cast<const T*>(inputs[rank]) + start;
      if (rank == 0)
        for (size_t i = 0; i < n; ++i) total[i] = static_cast<A>(input[i]);
      else
        for (size_t i = 0; i < n; ++i) total[i] = combine(total[i], static_cast<A>(input[i]));
    }
    T* output = reinterpret_cast<T*>(out) + start;
    for (size_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<A, float>)
        output[i] = round_to<T>(total[i]);
      else
        output[i] = static_cast<T>(total[i]);
    }
  }
}

// S compares (signed where A is not).
template <class T, class A, class S>
void reduce_as(char* out, const std::vector<const char*>& inputs, size_t count, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return reduce_with<T, A>(out, inputs, count, [](A a, A b) { return A(a + b); });
    case HCCL_REDUCE_PROD: return reduce_with<T, A>(out, inputs, count, [](A a, A b) { return A(a * b); });
    case HCCL_REDUCE_MAX:
      return reduce_with<T, A>(out, inputs, count, [](A a, A b) { return S(b) > S(a) || b != b ? b : a; });
    default: return reduce_with<T, A>(out, inputs, count, [](A a, A b) { return S(b) < S(a) || b != b ? b : a; });
  }
}

void reduce(char* out, const std::vector<const char*>& inputs, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, uint32_t, int8_t>(out, inputs, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, uint32_t, int16_t>(out, inputs, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t, uint32_t, int32_t>(out, inputs, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t, uint64_t, int64_t>(out, inputs, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16, float, float>(out, inputs, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<BFloat16, float, float>(out, inputs, count, op);
    default: return reduce_as<float, float, float>(out, inputs, count, op);
  }
}

void check_reduction(Kind kind, HcclDataType type, HcclReduceOp op) {
  const DataType& info = data_type(type);
  bool supported =
      info.reducible && !(op == HCCL_REDUCE_PROD && (type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16));
  if (kind == Kind::ReduceScatterV) supported = supported && op != HCCL_REDUCE_PROD && type != HCCL_DATA_TYPE_INT64;
  if (!supported)
    throw Fault{HCCL_E_NOT_SUPPORT, std::string("Hccl") + name_of(kind) + "(" + name_of(op) + ") of " + info.name +
                                        " is not supported on Atlas A2"};
}

// ---- the two collectives that the others are made of

struct Layout {  // elements for or from each rank, and where they lie in the buffer
  Counts counts, offsets;
  static Layout equal(uint32_t ranks, uint64_t count) {
    Layout layout{Counts(ranks, count), Counts(ranks)};
    for (uint32_t rank = 0; rank < ranks; ++rank) layout.offsets[rank] = rank * count;
    return layout;
  }
  static Layout given(uint32_t ranks, const void* counts, const void* offsets) {
    auto c = static_cast<const uint64_t*>(counts), o = static_cast<const uint64_t*>(offsets);
    return {Counts(c, c + ranks), Counts(o, o + ranks)};
  }
  static Layout split(uint32_t ranks, uint64_t count) {
    Layout layout{Counts(ranks), Counts(ranks)};
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      layout.offsets[rank] = count * rank / ranks;
      layout.counts[rank] = count * (rank + 1) / ranks - layout.offsets[rank];
    }
    return layout;
  }
  uint64_t total() const { return std::accumulate(counts.begin(), counts.end(), uint64_t{0}); }
};

struct Part {
  char* data;
  uint64_t count;
};

// Sends sent(r) to each other rank r and receives received(r) from it. Ranks with nothing to say still tell their call.
template <class Sent, class Received>
void all_to_all(Communicator& comm, Call call, Sent sent, Received received) {
  const size_t width = data_type(call.type).bytes;
  const bool varying =
      call.kind == Kind::AllGatherV || call.kind == Kind::AlltoAllV || call.kind == Kind::ReduceScatterV;
  std::vector<Message> messages;
  for (uint32_t step = 1; step < comm.size; ++step) {
    const uint32_t peer = (comm.rank + step) % comm.size;
    const Part out = sent(peer), in = received(peer);
    if (varying) call.count = out.count;
    messages.push_back({&comm, true, peer, call, out.data, out.count * width});
    if (varying) call.count = in.count;
    messages.push_back({&comm, false, peer, call, in.data, in.count * width});
  }
  exchange(std::move(messages));
}

// Rank r gets the reduction over all ranks of the r-th part of `in`.
void reduce_scatter(Communicator& comm, Call call, char* in, const Layout& parts, char* out) {
  const auto type = HcclDataType(call.type);
  const size_t width = data_type(type).bytes, mine = parts.counts[comm.rank];
  std::unique_ptr<char[]> theirs(new char[comm.size * mine * width + 1]);
  auto from = [&](uint32_t peer) { return theirs.get() + peer * mine * width; };
  all_to_all(
      comm, call, [&](uint32_t peer) { return Part{in + parts.offsets[peer] * width, parts.counts[peer]}; },
      [&](uint32_t peer) { return Part{from(peer), mine}; });
  std::vector<const char*> inputs;
  for (uint32_t rank = 0; rank < comm.size; ++rank)
    inputs.push_back(rank == comm.rank ? in + parts.offsets[rank] * width : from(rank));
  reduce(out, inputs, mine, type, HcclReduceOp(call.op));
}

// Every rank gets the parts of all ranks.
void all_gather(Communicator& comm, Call call, const char* in, char* out, const Layout& parts) {
  const size_t width = data_type(call.type).bytes, mine = parts.counts[comm.rank];
  char* own = out + parts.offsets[comm.rank] * width;
  memmove(own, in, mine * width);
  // Sent from its place in `out`: `in` may lie in another rank's place, which is being received into.
  all_to_all(
      comm, call, [&](uint32_t) { return Part{own, mine}; },
      [&](uint32_t peer) { return Part{out + parts.offsets[peer] * width, parts.counts[peer]}; });
}

// ---- the edge to C

Communicator& communicator(HcclComm handle) {
  if (!handle) throw Fault{HCCL_E_PTR, "the communicator is null"};
  return *static_cast<Communicator*>(handle);
}
char* address(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)); }

void check_rank(const Communicator& comm, uint32_t rank, const char* role) {
  if (rank >= comm.size)
    throw Fault{HCCL_E_PARA, comm.here() + role + " " + std::to_string(rank) + " is not a rank of this communicator"};
}

template <class Body>
HcclResult guarded(Body body) {
  try {
    body();
    return HCCL_SUCCESS;
  } catch (const Fault& fault) {
    emulator_set_error(("HCCL: " + fault.message).c_str());
    return fault.code;
  } catch (const std::exception& error) {
    emulator_set_error((std::string("HCCL: ") + error.what()).c_str());
    return HCCL_E_INTERNAL;
  }
}

// ---- meeting: every rank listens under the root's token and its own number, and connects to all others

struct Hello {
  uint32_t rank, size;
  int32_t pid;
};

constexpr char ROOT_PREFIX[] = "npu-emulator-hccl-";

socklen_t socket_name(const std::string& token, uint32_t rank, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::string name = token + "-" + std::to_string(rank);  // after a NUL: abstract, gone with its socket
  memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int new_socket() {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw Fault{HCCL_E_SYSCALL, std::string("socket: ") + strerror(errno)};
  int bytes = 1 << 20;  // as far as the system allows: fewer wakings for large messages
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  return fd;
}

struct Socket {
  int fd;
  ~Socket() { close(fd); }
};

void greet(Communicator& comm, const std::string& token, int limit) {
  Socket listening{new_socket()};
  sockaddr_un address;
  socklen_t length = socket_name(token, comm.rank, address);
  if (bind(listening.fd, reinterpret_cast<sockaddr*>(&address), length) || listen(listening.fd, comm.size))
    throw Fault{HCCL_E_SYSCALL, comm.here() + "cannot listen, is another process this rank too? " + strerror(errno)};

  const auto deadline = Clock::now() + std::chrono::seconds(limit);
  int pause = 1;
  for (;;) {
    bool complete = true;
    for (uint32_t rank = 0; rank < comm.size; ++rank) {
      Peer& peer = comm.peers[rank];
      if (rank == comm.rank || peer.to >= 0) continue;
      int fd = new_socket();
      length = socket_name(token, rank, address);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), length)) {
        close(fd);
        complete = false;
        continue;
      }
      peer.to = fd;
      Hello hello{comm.rank, comm.size, getpid()};
      send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
    }
    for (pollfd knock{listening.fd, POLLIN, 0}; poll(&knock, 1, 0) > 0;) {
      int fd = accept4(listening.fd, nullptr, nullptr, SOCK_CLOEXEC);
      Hello hello;
      if (fd < 0) break;
      if (recv(fd, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) {
        close(fd);
        continue;
      }
      if (hello.size != comm.size || hello.rank >= comm.size) {
        close(fd);
        throw Fault{HCCL_E_PARA, comm.here() + "mismatch: process " + std::to_string(hello.pid) + " joins as rank " +
                                     std::to_string(hello.rank) + " of " + std::to_string(hello.size)};
      }
      comm.peers[hello.rank].from = fd;
      comm.peers[hello.rank].pid = hello.pid;
    }
    std::string missing;
    for (uint32_t rank = 0; rank < comm.size; ++rank)
      if (rank != comm.rank && comm.peers[rank].from < 0)
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
    if (complete && missing.empty()) return;
    if (Clock::now() > deadline)
      throw Fault{HCCL_E_TIMEOUT, comm.here() + missing + " did not come within " + std::to_string(limit) +
                                      " s (HCCL_CONNECT_TIMEOUT)"};
    pollfd knock{listening.fd, POLLIN, 0};
    poll(&knock, 1, pause);
    pause = std::min(pause * 2, 20);
  }
}

HcclResult join(uint32_t size, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config, HcclComm* out) {
  return guarded([&] {
    if (!root || !out) throw Fault{HCCL_E_PTR, "the root info or the result is null"};
    std::string token(root->internal, strnlen(root->internal, sizeof root->internal));
    if (token.rfind(ROOT_PREFIX, 0) != 0) throw Fault{HCCL_E_PARA, "the root info is not one of HcclGetRootInfo"};
    if (rank >= size)
      throw Fault{HCCL_E_PARA, "rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks"};
    auto comm = std::make_unique<Communicator>();
    comm->name = config && config->hcclCommName[0] ? config->hcclCommName : token;
    comm->size = size;
    comm->rank = rank;
    comm->peers.resize(size);
    comm->timeout = seconds("HCCL_EXEC_TIMEOUT", 1836);
    if (config && config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET)
      comm->timeout = config->hcclExecTimeOut;
    greet(*comm, token, seconds("HCCL_CONNECT_TIMEOUT", 120));
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry.insert(comm.get());
    *out = comm.release();
  });
}

// ---- point-to-point calls between HcclGroupStart and HcclGroupEnd run together

thread_local int group_depth = 0;
thread_local std::vector<Message> group;

void submit(std::vector<Message> messages) {
  if (group_depth)
    group.insert(group.end(), messages.begin(), messages.end());
  else
    exchange(std::move(messages));
}

Message point_to_point(HcclComm handle, bool sending, const void* buffer, uint64_t count, HcclDataType type,
                       uint32_t peer) {
  Communicator& comm = communicator(handle);
  check_rank(comm, peer, sending ? "destination" : "source");
  if (peer == comm.rank) throw Fault{HCCL_E_PARA, comm.here() + "a rank cannot send to itself"};
  return {&comm,
          sending,
          peer,
          Call{Kind::SendRecv, type, NONE, NONE, count},
          address(buffer),
          count * data_type(type).bytes};
}

}  // namespace

// ---- communicators

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  return guarded([&] {
    if (!root) throw Fault{HCCL_E_PTR, "the root info is null"};
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random) throw Fault{HCCL_E_SYSCALL, "getrandom failed"};
    std::string token = ROOT_PREFIX;
    for (unsigned char byte : random) {
      token += "0123456789abcdef"[byte >> 4];
      token += "0123456789abcdef"[byte & 15];
    }
    memset(root->internal, 0, sizeof root->internal);
    memcpy(root->internal, token.data(), token.size());
  });
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return join(size, root, rank, nullptr, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return join(size, root, rank, config, comm);
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclCommDestroy(HcclComm handle) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    {
      std::lock_guard<std::mutex> lock(registry_mutex);
      registry.erase(&comm);
    }
    {
      std::lock_guard<std::mutex> lock(comm.mutex);
      comm.leave("it destroyed the communicator");
    }
    delete &comm;
  });
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  return guarded([&] { strncpy(name, communicator(handle).name.c_str(), COMM_NAME_MAX_LENGTH); });
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  return guarded([&] { *size = communicator(handle).size; });
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  return guarded([&] { *rank = communicator(handle).rank; });
}

// Nothing is asynchronous: every failure was already returned by the call that met it.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_NOT_SUPPORT: return "feature not supported";
    case HCCL_E_SYSCALL: return "call system interface error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_REMOTE: return "remote error";
    default: return "internal error";
  }
}

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }  // determinism: always
HcclResult HcclCommResume(HcclComm handle) {
  return guarded([&] {
    if (!communicator(handle).failure.empty())
      throw Fault{HCCL_E_NOT_SUPPORT, "a failed communicator cannot be resumed"};
  });
}

// ---- collectives; bytes read and written are those of this rank's buffers

HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    check_reduction(Kind::AllReduce, type, op);
    const size_t width = data_type(type).bytes;
    const Layout parts = Layout::split(comm.size, count);
    char* own = address(out) + parts.offsets[comm.rank] * width;
    const Call call{Kind::AllReduce, type, op, NONE, count};
    reduce_scatter(comm, call, address(in), parts, own);
    all_gather(comm, call, own, address(out), parts);
    emulator_record_launch("HcclAllReduce", count * width, count * width);
  });
}

HcclResult HcclReduceScatterV(void* in, const void* counts, const void* offsets, void* out, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    check_reduction(Kind::ReduceScatterV, type, op);
    const Layout parts = Layout::given(comm.size, counts, offsets);
    if (parts.counts[comm.rank] != count)
      throw Fault{HCCL_E_PARA, comm.here() + "recvCount differs from sendCounts[rank]"};
    reduce_scatter(comm, Call{Kind::ReduceScatterV, type, op}, address(in), parts, address(out));
    emulator_record_launch("HcclReduceScatterV", parts.total() * data_type(type).bytes, count * data_type(type).bytes);
  });
}

HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                             aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    check_reduction(Kind::ReduceScatter, type, op);
    const Layout parts = Layout::equal(comm.size, count);
    reduce_scatter(comm, Call{Kind::ReduceScatter, type, op, NONE, count}, address(in), parts, address(out));
    emulator_record_launch("HcclReduceScatter", parts.total() * data_type(type).bytes, count * data_type(type).bytes);
  });
}

HcclResult HcclAllGatherV(void* in, uint64_t count, void* out, const void* counts, const void* offsets,
                          HcclDataType type, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    const Layout parts = Layout::given(comm.size, counts, offsets);
    const size_t width = data_type(type).bytes;
    if (parts.counts[comm.rank] != count)
      throw Fault{HCCL_E_PARA, comm.here() + "sendCount differs from recvCounts[rank]"};
    all_gather(comm, Call{Kind::AllGatherV, type}, address(in), address(out), parts);
    emulator_record_launch("HcclAllGatherV", count * width, parts.total() * width);
  });
}

HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    const size_t width = data_type(type).bytes;
    const Layout parts = Layout::equal(comm.size, count);
    all_gather(comm, Call{Kind::AllGather, type, NONE, NONE, count}, address(in), address(out), parts);
    emulator_record_launch("HcclAllGather", count * width, parts.total() * width);
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    const uint64_t bytes = count * data_type(type).bytes;
    check_rank(comm, root, "root");
    all_to_all(
        comm, Call{Kind::Broadcast, type, NONE, root, count},
        [&](uint32_t) { return Part{address(buffer), comm.rank == root ? count : 0}; },
        [&](uint32_t peer) { return Part{address(buffer), peer == root ? count : 0}; });
    emulator_record_launch("HcclBroadcast", comm.rank == root ? bytes : 0, comm.rank == root ? 0 : bytes);
  });
}

HcclResult HcclReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    check_reduction(Kind::Reduce, type, op);
    check_rank(comm, root, "root");
    Layout parts = Layout::equal(comm.size, 0);
    parts.counts[root] = count;
    reduce_scatter(comm, Call{Kind::Reduce, type, op, root, count}, address(in), parts, address(out));
    const uint64_t bytes = count * data_type(type).bytes;
    emulator_record_launch("HcclReduce", bytes, comm.rank == root ? bytes : 0);
  });
}

HcclResult HcclScatter(void* in, void* out, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    const uint64_t bytes = count * data_type(type).bytes;
    check_rank(comm, root, "root");
    const bool is_root = comm.rank == root;
    all_to_all(
        comm, Call{Kind::Scatter, type, NONE, root, count},
        [&](uint32_t peer) { return is_root ? Part{address(in) + peer * bytes, count} : Part{nullptr, 0}; },
        [&](uint32_t peer) { return Part{address(out), peer == root ? count : 0}; });
    if (is_root) memmove(out, address(in) + root * bytes, bytes);
    emulator_record_launch("HcclScatter", is_root ? bytes * comm.size : 0, bytes);
  });
}

namespace {

void all_to_all_v(const char* name, Communicator& comm, Kind kind, const void* in, const Layout& sent, const void* out,
                  const Layout& received, HcclDataType type) {
  const size_t width = data_type(type).bytes;
  auto part = [width](const void* buffer, const Layout& layout, uint32_t rank) {
    return Part{address(buffer) + layout.offsets[rank] * width, layout.counts[rank]};
  };
  const Part from = part(in, sent, comm.rank), to = part(out, received, comm.rank);
  if (from.count != to.count) throw Fault{HCCL_E_PARA, comm.here() + "a rank's own send and receive counts differ"};
  memmove(to.data, from.data, from.count * width);
  all_to_all(
      comm, Call{kind, type, NONE, NONE, from.count}, [&](uint32_t peer) { return part(in, sent, peer); },
      [&](uint32_t peer) { return part(out, received, peer); });
  emulator_record_launch(name, sent.total() * width, received.total() * width);
}

}  // namespace

HcclResult HcclAlltoAllV(const void* in, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                         const void* out, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_type, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    if (send_type != receive_type)
      throw Fault{HCCL_E_PARA, comm.here() + "AlltoAllV: the send and receive types differ"};
    all_to_all_v("HcclAlltoAllV", comm, Kind::AlltoAllV, in, Layout::given(comm.size, send_counts, send_offsets), out,
                 Layout::given(comm.size, receive_counts, receive_offsets), send_type);
  });
}

HcclResult HcclAlltoAll(const void* in, uint64_t send_count, HcclDataType send_type, const void* out,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream) {
  return guarded([&] {
    Communicator& comm = communicator(handle);
    if (send_type != receive_type)
      throw Fault{HCCL_E_PARA, comm.here() + "AlltoAll: the send and receive types differ"};
    all_to_all_v("HcclAlltoAll", comm, Kind::AlltoAll, in, Layout::equal(comm.size, send_count), out,
                 Layout::equal(comm.size, receive_count), send_type);
  });
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream) {
  return guarded([&] {
    auto nothing = [](uint32_t) { return Part{nullptr, 0}; };
    all_to_all(communicator(handle), Call{Kind::Barrier, HCCL_DATA_TYPE_INT8}, nothing, nothing);
    emulator_record_launch("HcclBarrier", 0, 0);
  });
}

// ---- point to point

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm handle, aclrtStream) {
  return guarded([&] {
    submit({point_to_point(handle, true, buffer, count, type, to)});
    emulator_record_launch("HcclSend", count * data_type(type).bytes, 0);
  });
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm handle, aclrtStream) {
  return guarded([&] {
    submit({point_to_point(handle, false, buffer, count, type, from)});
    emulator_record_launch("HcclRecv", 0, count * data_type(type).bytes);
  });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream) {
  return guarded([&] {
    std::vector<Message> messages;
    uint64_t read = 0, written = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const HcclSendRecvItem& item = items[i];
      const bool sending = item.sendRecvType == HCCL_SEND;
      messages.push_back(point_to_point(handle, sending, item.buf, item.count, item.dataType, item.remoteRank));
      (sending ? read : written) += messages.back().bytes;
    }
    submit(std::move(messages));
    emulator_record_launch("HcclBatchSendRecv", read, written);
  });
}

HcclResult HcclGroupStart() {
  group_depth++;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  return guarded([&] {
    if (!group_depth) throw Fault{HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart"};
    if (--group_depth == 0) exchange(std::exchange(group, {}));
  });
}
