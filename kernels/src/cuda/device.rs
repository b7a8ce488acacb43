//! A GPU: memory, modules, launches, graphs and events. All calls of the driver are here.
//!
//! A [`Device`] is a handle that can be cloned; buffers and kernels keep it alive. Work is queued on one stream in the
//! order of the calls. Device memory is never mapped into this process, so nothing here hands out a reference to it:
//! it is named by [`Pointer`]s, copied by [`Buffer::upload`] and [`Buffer::download`], and computed on by
//! [`Kernel::launch`], which is `unsafe` because only the kernel's source says what it touches.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};
use std::{fmt, ptr, slice};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute, CUresult};
use cudarc::driver::{CudaContext, DriverError};
use thiserror::Error;

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// The oldest driver that takes this build's kernels: they are made by nvcc 13.0.
const DRIVER_VERSION_MIN: i32 = 13_000;

/// Compute capability from which kernels overlap. Where they do, a kernel that wants a multiprocessor divided otherwise than
/// the one in front, into shared memory and first-level cache, waits for it to be empty; so all want the same.
const OVERLAPPING: (i32, i32) = (9, 0);

/// Modules that are faster with more of that cache: by 2 % at eight sequences.
const CACHED_MODULES: [&str; 1] = ["attention"];

/// Why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unavailable {
    /// NVIDIA's driver library cannot be loaded.
    #[error("libcuda.so.1 is not installed")]
    NoLibrary,
    /// The driver answers with an error, or knows no GPU.
    #[error("NVIDIA's driver reports no usable GPU ({0})")]
    NoDevice(String),
    /// The driver is older than the kernels.
    #[error("NVIDIA's driver supports CUDA {}.{}, but 13.0 is needed (driver 580 or later)", .0 / 1000, .0 % 1000 / 10)]
    OldDriver(i32),
    /// No such GPU.
    #[error("there is no GPU {ordinal}, only {count}")]
    Ordinal {
        /// The one asked for.
        ordinal: usize,
        /// GPUs there are.
        count: usize,
    },
    /// Kernels need Ampere or later.
    #[error("{name} has compute capability {major}.{minor}, but 8.0 is needed")]
    TooOld {
        /// Its name.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
}

/// Why the GPU did not do what it was told.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// There is none to use.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The driver refused, or reports that earlier work failed.
    #[error("the GPU driver failed at {call}: {name}, {message}")]
    Driver {
        /// What was asked of it.
        call: &'static str,
        /// The driver's name for the error.
        name: String,
        /// Its explanation.
        message: String,
    },
    /// Device memory ran out.
    #[error("{wanted} bytes of GPU memory are needed, but {free} of {total} are free")]
    Memory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free.
        free: u64,
        /// Bytes there are.
        total: u64,
    },
    /// This build has no code of a kernel for this GPU.
    #[error("this build has no kernel {module}::{name} for compute capability {major}.{minor}")]
    NoKernel {
        /// The file it would be in.
        module: String,
        /// The kernel.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// An operation does not support a shape.
    #[error("{operation} on the GPU does not support {what}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The shape.
        what: String,
    },
}

/// What a GPU is, as far as kernels and reports ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The product's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory a block may ask for.
    pub shared_bytes_max: u32,
    /// Level 2 cache.
    pub l2_bytes: u64,
    /// Device memory.
    pub memory_bytes: u64,
    /// The CUDA version that the driver supports, 13000 for 13.0.
    pub driver_version: i32,
}

/// Types that are the same bytes on both sides, any of which are a value.
///
/// # Safety
/// Every pattern of bits is a value, and there is no padding.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

/// Types a kernel takes by value.
///
/// # Safety
/// The type has the size, alignment and meaning of the parameter it is given for: it is a C type.
pub unsafe trait KernelArgument: Copy {}

macro_rules! plain {
    ($($type:ty),*) => { $(
        // SAFETY: a number without invalid patterns or padding, and the C type of the same size.
        unsafe impl Plain for $type {}
        // SAFETY: as above.
        unsafe impl KernelArgument for $type {}
    )* };
}
plain!(u8, u16, u32, u64, i8, i32, f32, half::bf16, half::f16);

/// How many GPUs there are, or why none can be used. Never fails in another way: that is what makes it safe to ask on
/// any machine.
pub fn device_count() -> Result<usize, Unavailable> {
    // SAFETY: loads and unloads a library by name; its initialisers are NVIDIA's.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoLibrary);
    }
    let no_device = |error: CudaError| Unavailable::NoDevice(error.to_string());
    // SAFETY: the library is there, and this is the call it wants first.
    check("cuInit", unsafe { sys::cuInit(0) }).map_err(no_device)?;
    let version = driver_version().map_err(no_device)?;
    if version < DRIVER_VERSION_MIN {
        return Err(Unavailable::OldDriver(version));
    }
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) }).map_err(no_device)?;
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(Unavailable::NoDevice("there is none".to_owned())),
    }
}

fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// The driver's answer to `call`, as a result.
fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(refused(call, DriverError(code))),
    }
}

fn refused(call: &'static str, error: DriverError) -> CudaError {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| format!("code {}", error.0 as i32), |text| text.to_string_lossy().into_owned())
    };
    CudaError::Driver { call, name: text(error.error_name()), message: text(error.error_string()) }
}

/// A GPU with the stream that everything runs on.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
    modules: Mutex<BTreeMap<String, Option<Module>>>,
    properties: Properties,
    /// Launches so far, while they are profiled.
    profile: Mutex<Option<Vec<Profiled>>>,
}

/// A launch, and the points before and behind it.
struct Profiled {
    kernel: Arc<str>,
    start: RawEvent,
    end: RawEvent,
}

/// An event that does not hold its device.
struct RawEvent(sys::CUevent);

// SAFETY: a handle of the driver, see `Inner`.
unsafe impl Send for RawEvent {}

/// How long a kernel ran.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// `module::name`.
    pub kernel: Arc<str>,
    /// From the end of what was in front of it to its own end.
    pub seconds: f64,
}

/// A loaded fatbin; unloaded with the device.
#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: handles of the driver, which may be used from any thread whose current context is theirs; every use here
// makes the context current first. The map of modules is behind a mutex.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Inner {}
// SAFETY: a handle of the driver, see above.
unsafe impl Send for Module {}

impl Drop for Inner {
    fn drop(&mut self) {
        let modules = self.modules.get_mut().map(std::mem::take).unwrap_or_default();
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nobody else has the stream or the modules: kernels and buffers hold the device.
            unsafe {
                sys::cuStreamSynchronize(self.stream);
                for module in modules.into_values().flatten() {
                    sys::cuModuleUnload(module.0);
                }
                sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}

impl Device {
    /// Opens GPU number `ordinal`.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(Unavailable::Ordinal { ordinal, count }.into());
        }
        let context = CudaContext::new(ordinal).map_err(|error| refused("cuDevicePrimaryCtxRetain", error))?;
        let attribute = |which| context.attribute(which).map_err(|error| refused("cuDeviceGetAttribute", error));
        let name = context.name().map_err(|error| refused("cuDeviceGetName", error))?;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability.0 < 8 {
            return Err(Unavailable::TooOld { name, major: capability.0, minor: capability.1 }.into());
        }
        let (_, total) = memory_info(&context)?;
        let properties = Properties {
            name,
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            shared_bytes_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                .unsigned_abs(),
            l2_bytes: u64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.unsigned_abs()),
            memory_bytes: total,
            driver_version: driver_version()?,
        };
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current, as `memory_info` made it; `stream` outlives the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(Arc::new(Inner { context, stream, modules: Mutex::default(), properties, profile: Mutex::default() })))
    }

    /// What this GPU is.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Bytes of device memory that are free now.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        Ok(memory_info(&self.0.context)?.0)
    }

    /// The kernel `name` of `cu/*/module.cu`.
    pub fn kernel(&self, module: &str, name: &str) -> Result<Kernel, CudaError> {
        let missing = || {
            let (major, minor) = self.0.properties.capability;
            CudaError::NoKernel { module: module.to_owned(), name: name.to_owned(), major, minor }
        };
        let loaded = self.module(module)?.ok_or_else(missing)?;
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut function = ptr::null_mut();
        // SAFETY: `module` made the context current; the module stays loaded as long as the device, which the kernel
        // holds.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, loaded.0, symbol.as_ptr()) };
        if code == CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(missing());
        }
        check("cuModuleGetFunction", code)?;
        let kernel = Kernel { device: self.clone(), function, name: format!("{module}::{name}").into() };
        if self.0.properties.capability >= OVERLAPPING && !CACHED_MODULES.contains(&module) {
            kernel.prefer_shared()?;
        }
        Ok(kernel)
    }

    /// Whether this build has `cu/*/module.cu` for this GPU.
    pub fn has_module(&self, module: &str) -> Result<bool, CudaError> {
        Ok(self.module(module)?.is_some())
    }

    fn module(&self, name: &str) -> Result<Option<Module>, CudaError> {
        self.make_current()?;
        let mut modules = self.0.modules.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(module) = modules.get(name) {
            return Ok(*module);
        }
        let module = match FATBINS.iter().find(|(fatbin, _)| *fatbin == name) {
            None => None,
            Some((_, image)) => {
                let mut module = ptr::null_mut();
                // SAFETY: `image` is a fatbin that nvcc made, whose header holds its length.
                let code = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
                match code {
                    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_PTX => None,
                    code => check("cuModuleLoadData", code).map(|()| Some(Module(module)))?,
                }
            }
        };
        modules.insert(name.to_owned(), module);
        Ok(module)
    }

    /// A buffer of `len` elements that hold anything.
    pub fn allocate<T: Plain>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        self.make_current()?;
        let bytes = len.checked_mul(size_of::<T>()).expect("sizes are checked before memory is asked for");
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: `address` outlives the call.
            let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
            if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let (free, total) = memory_info(&self.0.context)?;
                return Err(CudaError::Memory { wanted: bytes as u64, free, total });
            }
            check("cuMemAlloc", code)?;
        }
        Ok(Buffer { device: self.clone(), address, len, elements: PhantomData })
    }

    /// A buffer of `len` elements whose bytes are all zero.
    pub fn zeroed<T: Plain>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        let mut buffer = self.allocate(len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// A buffer with the given elements.
    pub fn uploaded<T: Plain>(&self, values: &[T]) -> Result<Buffer<T>, CudaError> {
        let mut buffer = self.allocate(values.len())?;
        buffer.upload(0, values)?;
        Ok(buffer)
    }

    /// Host memory of `len` zeroed elements that the device can read and write by itself.
    pub fn pinned<T: Plain>(&self, len: usize) -> Result<Pinned<T>, CudaError> {
        self.make_current()?;
        let mut start = ptr::null_mut();
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: `start` outlives the call; the memory is then written before anyone reads it.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE))?;
            ptr::write_bytes(start.cast::<u8>(), 0, bytes);
        }
        Ok(Pinned { device: self.clone(), start: start.cast(), len })
    }

    /// Waits for everything that was queued. Errors of kernels show up here, and nothing works after one.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: the stream is this device's.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.stream) })
    }

    /// Records what `work` queues instead of running it. Nothing that `work` calls may allocate or wait.
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.make_current()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this device's, and nobody else uses it: `Device` is not shared between threads that
        // work at once, and the mode keeps others' calls out.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.0.stream, mode) })?;
        let done = work();
        let mut graph = ptr::null_mut();
        // SAFETY: ends what was begun above, also after an error of `work`.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.0.stream, &raw mut graph) });
        done?;
        ended?;
        let mut executable = ptr::null_mut();
        // SAFETY: `graph` is the captured graph, instantiated once and then destroyed.
        let instantiated = unsafe {
            let code = sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0);
            sys::cuGraphDestroy(graph);
            check("cuGraphInstantiate", code)
        };
        instantiated?;
        Ok(Graph { device: self.clone(), executable })
    }

    /// Runs `work`, waits for what it queued, and says how long each kernel took, in order. Kernels do not overlap
    /// meanwhile, and each is a little slower than otherwise. What graphs launch is not seen.
    pub fn profile<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Vec<KernelTime>, E> {
        let lock = || self.0.profile.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *lock() = Some(Vec::new());
        let done = work();
        let launches = lock().take().unwrap_or_default();
        let synchronized = self.synchronize();
        let mut times = Vec::with_capacity(launches.len());
        for Profiled { kernel, start, end } in launches {
            let mut milliseconds = 0.0f32;
            // SAFETY: both events were made by `mark` and are destroyed here, once.
            unsafe {
                sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.0, end.0);
                sys::cuEventDestroy_v2(start.0);
                sys::cuEventDestroy_v2(end.0);
            }
            times.push(KernelTime { kernel, seconds: f64::from(milliseconds) / 1e3 });
        }
        done?;
        synchronized?;
        Ok(times)
    }

    /// A new event, recorded here. The context is current.
    fn mark(&self) -> Result<RawEvent, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` outlives the first call; event and stream are of the same context.
        unsafe {
            check("cuEventCreate", sys::cuEventCreate(&raw mut event, 0))?;
            check("cuEventRecord", sys::cuEventRecord(event, self.0.stream))?;
        }
        Ok(RawEvent(event))
    }

    /// A point in the stream whose time can be taken.
    pub fn event(&self) -> Result<Event, CudaError> {
        self.make_current()?;
        let mut event = ptr::null_mut();
        // SAFETY: `event` outlives the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, 0) })?;
        Ok(Event { device: self.clone(), event })
    }

    /// Queues a copy of `len` elements within device memory.
    ///
    /// # Safety
    /// Both ranges are allocated and stay so until the copy is done, and they do not overlap.
    pub unsafe fn copy<T: Plain>(&self, to: Pointer<T>, from: Pointer<T>, len: usize) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.address, from.address, len * size_of::<T>(), self.0.stream)
        })
    }

    fn make_current(&self) -> Result<(), CudaError> {
        self.0.context.bind_to_thread().map_err(|error| refused("cuCtxSetCurrent", error))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.0.properties.name).finish()
    }
}

/// Free bytes and bytes in all. Makes the context current.
fn memory_info(context: &CudaContext) -> Result<(u64, u64), CudaError> {
    context.bind_to_thread().map_err(|error| refused("cuCtxSetCurrent", error))?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: both outlive the call.
    check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok((free as u64, total as u64))
}

/// A place in device memory; says nothing about what is there, or whether it still is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pointer<T> {
    address: u64,
    elements: PhantomData<fn() -> T>,
}

impl<T> Pointer<T> {
    /// No place: what kernels take for an argument that is absent.
    #[must_use]
    pub fn null() -> Self {
        Self { address: 0, elements: PhantomData }
    }

    /// The same place, taken for other elements.
    #[must_use]
    pub fn cast<U>(self) -> Pointer<U> {
        Pointer { address: self.address, elements: PhantomData }
    }

    /// The address, as tensor maps want it.
    #[must_use]
    pub fn address(self) -> u64 {
        self.address
    }

    /// The place `elements` further on.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "as `add` of Rust's own pointers, without their `unsafe`")]
    pub fn add(self, elements: usize) -> Self {
        Self { address: self.address + (elements * size_of::<T>()) as u64, elements: PhantomData }
    }
}

// SAFETY: four numbers without padding, `uint4` on the device.
unsafe impl Plain for [u32; 4] {}
// SAFETY: an address of 64 bits, which is what a pointer parameter of a kernel is.
unsafe impl<T: Copy> KernelArgument for Pointer<T> {}
// SAFETY: a number; tables of pointers in device memory are made of them.
unsafe impl<T: Copy + 'static> Plain for Pointer<T> {}

/// Device memory of `len` elements. Freed when dropped, after the work that was queued before.
pub struct Buffer<T> {
    device: Device,
    address: u64,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: Plain> Buffer<T> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The first element's place.
    #[must_use]
    pub fn pointer(&self) -> Pointer<T> {
        Pointer { address: self.address, elements: PhantomData }
    }

    /// The place of element `index`.
    ///
    /// # Panics
    /// If it is beyond the end.
    #[must_use]
    pub fn at(&self, index: usize) -> Pointer<T> {
        assert!(index <= self.len, "element {index} of {}", self.len);
        self.pointer().add(index)
    }

    /// Copies `values` to the elements from `start` on, and waits.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn upload(&mut self, start: usize, values: &[T]) -> Result<(), CudaError> {
        assert!(start + values.len() <= self.len, "{} elements from {start} on of {}", values.len(), self.len);
        self.device.make_current()?;
        // SAFETY: the range is within the buffer, and `values` stays until the copy was waited for.
        check("cuMemcpyHtoDAsync", unsafe {
            let to = self.at(start).address;
            sys::cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), size_of_val(values), self.device.0.stream)
        })?;
        self.device.synchronize()
    }

    /// Copies the elements from `start` on into `out`, after everything that was queued before, and waits.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn download(&self, start: usize, out: &mut [T]) -> Result<(), CudaError> {
        assert!(start + out.len() <= self.len, "{} elements from {start} on of {}", out.len(), self.len);
        self.device.make_current()?;
        // SAFETY: the range is within the buffer, and `out` stays until the copy was waited for.
        check("cuMemcpyDtoHAsync", unsafe {
            let from = self.at(start).address;
            sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, size_of_val(out), self.device.0.stream)
        })?;
        self.device.synchronize()
    }

    /// All elements, after everything that was queued before.
    pub fn to_vec(&self) -> Result<Vec<T>, CudaError> {
        let mut values = Vec::with_capacity(self.len);
        // SAFETY: every pattern is a value, so any bytes will do until the copy fills them in.
        let spare: &mut [T] = unsafe {
            let spare: &mut [MaybeUninit<T>] = &mut values.spare_capacity_mut()[..self.len];
            ptr::write_bytes(spare.as_mut_ptr(), 0, self.len);
            slice::from_raw_parts_mut(spare.as_mut_ptr().cast(), self.len)
        };
        self.download(0, spare)?;
        // SAFETY: all of them were written.
        unsafe { values.set_len(self.len) };
        Ok(values)
    }

    /// Queues setting every byte.
    pub fn fill_bytes(&mut self, byte: u8) -> Result<(), CudaError> {
        self.device.make_current()?;
        match self.bytes() {
            0 => Ok(()),
            // SAFETY: the range is the buffer.
            bytes => check("cuMemsetD8Async", unsafe {
                sys::cuMemsetD8Async(self.address, byte, bytes, self.device.0.stream)
            }),
        }
    }

    /// Queues a copy of `len` elements of `source`, from `source_start` on, to those from `start` on.
    ///
    /// # Safety
    /// `source` is not written until the copy is done.
    ///
    /// # Panics
    /// If either range is beyond its end.
    pub unsafe fn upload_async(
        &self,
        start: usize,
        source: &Pinned<T>,
        source_start: usize,
        len: usize,
    ) -> Result<(), CudaError> {
        assert!(start + len <= self.len && source_start + len <= source.len);
        self.device.make_current()?;
        // SAFETY: both ranges are within their buffers; the caller keeps the source as it is.
        check("cuMemcpyHtoDAsync", unsafe {
            let from = source.start.add(source_start).cast();
            sys::cuMemcpyHtoDAsync_v2(self.at(start).address, from, len * size_of::<T>(), self.device.0.stream)
        })
    }

    /// Queues a copy of `len` elements from `start` on to those of `target` from `target_start` on.
    ///
    /// # Safety
    /// `target` is neither read nor written until the copy is done.
    ///
    /// # Panics
    /// If either range is beyond its end.
    pub unsafe fn download_async(
        &self,
        start: usize,
        target: &Pinned<T>,
        target_start: usize,
        len: usize,
    ) -> Result<(), CudaError> {
        assert!(start + len <= self.len && target_start + len <= target.len);
        self.device.make_current()?;
        // SAFETY: both ranges are within their buffers; the caller leaves the target alone.
        check("cuMemcpyDtoHAsync", unsafe {
            let to = target.start.add(target_start).cast();
            sys::cuMemcpyDtoHAsync_v2(to, self.at(start).address, len * size_of::<T>(), self.device.0.stream)
        })
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.address != 0 && self.device.make_current().is_ok() {
            // SAFETY: allocated here, freed once; the driver waits for work that still uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} elements at {:#x})", self.len, self.address)
    }
}

/// Host memory that the device copies from and to by itself.
pub struct Pinned<T> {
    device: Device,
    start: *mut T,
    len: usize,
}

// SAFETY: memory of plain values with one owner.
unsafe impl<T: Plain> Send for Pinned<T> {}
// SAFETY: as above; shared references only read.
unsafe impl<T: Plain> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    /// The values.
    #[must_use]
    pub fn values(&self) -> &[T] {
        // SAFETY: `len` elements were allocated and zeroed, and every pattern is a value.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }

    /// The values, to write.
    pub fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and this is the only reference.
        unsafe { slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: allocated here, freed once; work that may still use it is waited for.
            unsafe {
                sys::cuStreamSynchronize(self.device.0.stream);
                sys::cuMemFreeHost(self.start.cast());
            }
        }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} elements)", self.len)
    }
}

/// A function on the device.
#[derive(Clone)]
pub struct Kernel {
    device: Device,
    function: sys::CUfunction,
    name: Arc<str>,
}

// SAFETY: a handle of the driver, see `Inner`.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks of threads.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether the kernel may start before the one in front of it ends. It must then wait itself
    /// (`cudaGridDependencySynchronize`) before it touches anything that kernels in front of it write, or writes
    /// anything that they read. Needs compute capability 9.0; ignored below.
    pub overlaps: bool,
}

impl LaunchShape {
    /// `grid` blocks of `threads` threads, without dynamic shared memory or overlap.
    #[must_use]
    pub fn new(grid: [u32; 3], threads: u32) -> Self {
        Self { grid, threads, shared_bytes: 0, overlaps: false }
    }

    /// With that much dynamic shared memory; above 48 KiB, [`Kernel::allow_shared`] comes first.
    #[must_use]
    pub fn shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// Allowed to start early.
    #[must_use]
    pub fn overlapping(self) -> Self {
        Self { overlaps: true, ..self }
    }
}

/// A value for a parameter of a kernel.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Argument<'a>(*const c_void, PhantomData<&'a ()>);

/// `value` for a parameter of the same C type.
pub fn argument<T: KernelArgument>(value: &T) -> Argument<'_> {
    Argument(ptr::from_ref(value).cast(), PhantomData)
}

impl Kernel {
    /// Lets launches ask for up to `bytes` of dynamic shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        self.device.make_current()?;
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded as long as the device lives.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.function, which, bytes.cast_signed()) })
    }

    /// Asks for multiprocessors that are all shared memory, as far as they can be, and no first-level cache.
    fn prefer_shared(&self) -> Result<(), CudaError> {
        const PERCENT: i32 = 100;
        self.device.make_current()?;
        let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function is loaded as long as the device lives.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.function, which, PERCENT) })
    }

    /// Blocks of `threads` threads and `shared_bytes` of dynamic shared memory that fit a multiprocessor at once.
    pub fn blocks_resident(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        self.device.make_current()?;
        let mut blocks = 0;
        // SAFETY: the function is loaded as long as the device lives; `blocks` outlives the call.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.function,
                threads.cast_signed(),
                shared_bytes as usize,
            )
        })?;
        Ok(blocks.unsigned_abs())
    }

    /// Queues the kernel. A grid without blocks does nothing.
    ///
    /// # Safety
    /// - `arguments` are the kernel's parameters, in number, order and type.
    /// - Everything the kernel then reads and writes is allocated for as long as it runs, and of the sizes that its
    ///   source states.
    /// - If `shape` overlaps, the kernel waits as [`LaunchShape::overlaps`] says.
    pub unsafe fn launch(&self, shape: LaunchShape, arguments: &[Argument<'_>]) -> Result<(), CudaError> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        self.device.make_current()?;
        let mut overlap = MaybeUninit::<sys::CUlaunchAttribute>::zeroed();
        let overlaps = shape.overlaps && self.device.0.properties.capability.0 >= 9;
        if overlaps {
            let attribute = overlap.as_mut_ptr();
            // SAFETY: the attribute is zeroed plain data; these are the two fields that this kind has.
            unsafe {
                (*attribute).id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                (*attribute).value.programmaticStreamSerializationAllowed = 1;
            }
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.device.0.stream,
            attrs: overlap.as_mut_ptr(),
            numAttrs: u32::from(overlaps),
        };
        let mut profile = self.device.0.profile.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let start = profile.is_some().then(|| self.device.mark()).transpose()?;
        // SAFETY: `Argument` is a pointer; the driver copies the values it points to before it returns and writes
        // none. What the kernel does is the caller's promise.
        check("cuLaunchKernel", unsafe {
            let parameters = arguments.as_ptr().cast::<*mut c_void>().cast_mut();
            sys::cuLaunchKernelEx(&raw const config, self.function, parameters, ptr::null_mut())
        })?;
        if let (Some(profile), Some(start)) = (&mut *profile, start) {
            let (kernel, end) = (Arc::clone(&self.name), self.device.mark()?);
            profile.push(Profiled { kernel, start, end });
        }
        Ok(())
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

/// Queued work, recorded by [`Device::capture`].
pub struct Graph {
    device: Device,
    executable: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, see `Inner`.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues all of it.
    ///
    /// # Safety
    /// Everything the recorded work touches is still allocated.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the graph is instantiated, and the caller vouches for what it touches.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, self.device.0.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: instantiated here, destroyed once; the driver waits for a launch that still runs.
            unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Graph").field(&self.executable).finish()
    }
}

/// A point in the stream.
pub struct Event {
    device: Device,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver, see `Inner`.
unsafe impl Send for Event {}

impl Event {
    /// Puts the point behind everything that was queued so far.
    pub fn record(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: event and stream are of the same context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.device.0.stream) })
    }

    /// Waits until everything in front of the point is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// Seconds of the device from `earlier` to this point; both were recorded and passed.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64, CudaError> {
        self.device.make_current()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both events live; `milliseconds` outlives the call.
        let code = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.event, self.event) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: created here, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.event).finish()
    }
}
